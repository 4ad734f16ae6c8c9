"""Where Ray should put trainers and replicas: labels for nodes, and placement groups that keep to them.

Ray itself knows nothing of NVLink, racks or rails. `node_labels` says for `ray start --labels` what a topology knows of
a host; the two functions below ask Ray for nodes by such labels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wsync.errors import ConfigError
from wsync.topology import DomainKind, Topology

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

HOST, RACK, DOMAIN, RAIL = "wsync.io/host", "wsync.io/rack", "wsync.io/domain", "wsync.io/rail"
GPU_DOMAIN = "ray.io/gpu-domain"
"""Ray's own label of the NVLink domain that a node's GPUs are in; Ray never sets it."""
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

Bundles = Sequence[Mapping[str, float]]


def node_labels(topology: Topology, host_id: str) -> dict[str, str]:
    """Labels of a host: itself, its rack, the scale-up domain of its devices, its rails (`0-7`); what is known of it.

    A domain is named only if all devices of the host are in it. Raises ConfigError for a host that is not there.
    """
    if host_id not in {host.host_id for host in topology.hosts}:
        raise ConfigError(f"the topology has no host '{host_id}'")
    found = {HOST: host_id}
    rack = topology.domain_of(host_id, DomainKind.RACK)
    if rack is not None:
        found[RACK] = rack.domain_id
    devices = {device.device_id for device in topology.host_devices(host_id) if not device.partition_of}
    domain = next((d for d in topology.domains if d.is_scale_up and devices and devices <= set(d.members)), None)
    if domain is not None:
        found[DOMAIN] = domain.domain_id
        if domain.kind is DomainKind.NVLINK:
            found[GPU_DOMAIN] = domain.domain_id
    rails = sorted({nic.rail for nic in topology.host_nics(host_id) if nic.rail >= 0})
    if rails:
        found[RAIL] = str(rails[0]) if len(rails) == 1 else f"{rails[0]}-{rails[-1]}"
    return {label: _as_value(value) for label, value in found.items()}


def labels_option(labels: Mapping[str, str]) -> str:
    """As `ray start --labels=` takes them. (Its JSON form refuses the labels that begin with `ray.io/`.)"""
    return ",".join(f"{label}={value}" for label, value in sorted(labels.items()))


def group_inside(bundles: Bundles, *, label: str = GPU_DOMAIN, name: str = "") -> PlacementGroup:
    """A placement group whose bundles are all on nodes with one value of the label: a replica inside one domain.

    Returns at once; Ray places it as soon as one such domain has room for all of it. Raises ConfigError if no living
    node has the label: Ray would wait for ever.
    """
    from ray.util.placement_group import placement_group

    _values(label)
    found: PlacementGroup = placement_group(
        [dict(bundle) for bundle in bundles], name=name, topology_strategy={label: "STRICT_PACK"}
    )
    return found


def groups_across(groups: Sequence[Bundles], *, label: str = RACK) -> list[PlacementGroup]:
    """A placement group for each of `groups`, each on nodes of one value of the label, the values taken in turn.

    For a trainer and replicas that shall not all be lost with one rack. Which value a group gets depends on its place
    and on the values of the living nodes alone. Raises ConfigError if these have fewer than two.
    """
    from ray.util.placement_group import placement_group

    values = _values(label)
    if len(values) < 2:
        raise ConfigError(f"all nodes have '{values[0]}' as {label}", hint="start nodes with another value of it")
    return [
        placement_group(
            [dict(bundle) for bundle in bundles],
            bundle_label_selector=[{label: values[number % len(values)]} for _ in bundles],
        )
        for number, bundles in enumerate(groups)
    ]


def _values(label: str) -> list[str]:
    """Of the living nodes, in order."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    found: set[str] = {node["Labels"].get(label, "") for node in nodes if node["Alive"]} - {""}
    if not found:
        raise ConfigError(
            f"no node has the label {label}", hint="`ray start --labels` sets it; node_labels() says what to"
        )
    return sorted(found)


def _as_value(text: str) -> str:
    """Ray's values have 63 characters at most, of few kinds. The `/` of `host/nvlink0` becomes a dot."""
    text = text.replace("/", ".")
    if not _VALUE.fullmatch(text):
        raise ConfigError(
            f"'{text}' cannot be the value of a Ray label",
            hint="letters, digits, '-', '_' and '.', at most 63; declare hosts and domains with such names",
        )
    return text
