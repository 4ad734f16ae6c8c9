"""Where Kubernetes and Ray say a node is: its labels, as `kubectl get nodes -o json` or Ray give them.

A pod cannot see the labels of its own node without asking the API (the Downward API has none of them): whoever has the
right to ask hands the answer in, nothing here is found by looking around.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from wsync.discovery.reading import Tier, built, decoded, domains_of, network_tiers
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Source, Topology

_GKE = "cloud.google.com/gce-topology"
_GKE_DAEMON = "topology.gke.io"
_EKS = "topology.k8s.aws"
_OKE = "oci.oraclecloud.com"
_NETWORKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", (f"{_GKE}-subblock", f"{_GKE}-block")),
    ("", (f"{_GKE_DAEMON}/rack", f"{_GKE_DAEMON}/cluster")),
    (
        f"{_OKE}/host.rack_id",
        (f"{_OKE}/rdma.local_block_id", f"{_OKE}/rdma.network_block_id", f"{_OKE}/rdma.hpc_island_id"),
    ),
    (f"{_OKE}/host.rack_id", (f"{_OKE}/host.network_block_id",)),
    ("", ("ib/torset",)),
)
"""The label of the rack, where one names it, and those of the network's levels, the lowest first."""

_NUMBERED: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    ((f"{_EKS}/ultraserver-id", f"{_EKS}/capacity-block-id"), f"{_EKS}/network-node-layer-", True),
    ((), "fabric.topograph.run/tier-", False),
)
"""Labels of the rack; the levels' labels before their number; whether the highest number is the lowest level."""

_PLACES = ((DomainKind.ZONE, "topology.kubernetes.io/zone"), (DomainKind.SITE, "topology.kubernetes.io/region"))
_INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_GPU_DOMAINS = ("nvidia.com/gpu.clique", "ray.io/gpu-domain", "accelerator.topograph.run/domain")
_NO_DOMAIN = re.compile(r"[0-]*(\.\d*)?")
"""Text of a clique without a cluster: the driver's zero for a GPU that is in no fabric across hosts."""

_PLATFORMS = {"aws": "aws", "gce": "gcp", "azure": "azure"}


class _Metadata(msgspec.Struct, frozen=True):
    name: str
    labels: dict[str, str] = {}


class _NodeSpec(msgspec.Struct, frozen=True):
    provider_id: str = msgspec.field(name="providerID", default="")


class _Node(msgspec.Struct, frozen=True):
    metadata: _Metadata
    kind: str = "Node"
    spec: _NodeSpec = _NodeSpec()


class _List(msgspec.Struct, frozen=True):
    items: tuple[msgspec.Raw, ...]


class _Kind(msgspec.Struct, frozen=True):
    kind: str = ""


class _Found(msgspec.Struct):
    """What one node's labels say: of it, and of the devices that are known of it."""

    host: Host
    chains: list[tuple[str, Sequence[Tier]]]
    domains: list[Domain]
    devices: tuple[Device, ...]
    notes: list[str]


def read_nodes(text: str, *, host_ids: Mapping[str, str] | None = None, known: Topology | None = None) -> Topology:
    """Nodes of `kubectl get nodes -o json`, one or a list. `host_ids` are by node name; others keep that as host id.

    `known` has the devices of hosts, for the domains that labels put them in (see `read_node_labels`).
    """
    found = []
    for item in items_of(text, "Node"):
        node = decoded(item, _Node, "a node of Kubernetes")
        host_id = (host_ids or {}).get(node.metadata.name, node.metadata.name)
        placed = _placed(node.metadata.labels, host_id, known)
        scheme, _, where = node.spec.provider_id.partition("://")
        if scheme in _PLATFORMS:
            instance_id = where.rsplit("/", 1)[-1]
            provided = Host.told(Source.PLATFORM, host_id=host_id, platform=_PLATFORMS[scheme], instance_id=instance_id)
            placed.host = placed.host.joined(provided)
        found.append(placed)
    return _topology("the nodes of Kubernetes", found)


def read_node_labels(labels: Mapping[str, str], *, host_id: str, known: Topology | None = None) -> Topology:
    """The domains that the labels of a Kubernetes or Ray node put this host in, and the instance type.

    A label of an NVLink domain or of a TPU slice speaks of the devices of the host: of those that `known` has. Without
    any it is only noted.
    """
    return _topology(f"the labels of '{host_id}'", [_placed(labels, host_id, known)])


def _placed(labels: Mapping[str, str], host_id: str, known: Topology | None) -> _Found:
    rack, levels = _network(labels)
    tiers = [
        *network_tiers(levels, has_rack=bool(rack)),
        *((kind, labels[key]) for kind, key in _PLACES if labels.get(key)),
    ]
    chains: list[tuple[str, Sequence[Tier]]] = [(host_id, tiers)]
    if rack:
        chains.append((host_id, [(DomainKind.RACK, rack)]))
    devices = known.host_devices(host_id) if known else ()
    domains, notes = _scale_up(labels, devices, host_id)
    host = Host.told(Source.PLATFORM, host_id=host_id, instance_type=labels.get(_INSTANCE_TYPE, ""))
    return _Found(host, chains, domains, devices, notes)


def _topology(what: str, found: Sequence[_Found]) -> Topology:
    scale_up: dict[str, Domain] = {}
    for domain in (domain for node in found for domain in node.domains):
        before = scale_up.get(domain.domain_id)
        scale_up[domain.domain_id] = before.joined(domain) if before else domain
    chains = [chain for node in found for chain in node.chains]
    return built(
        what,
        hosts=tuple(node.host for node in found),
        devices=tuple(device for node in found for device in node.devices),
        domains=(*scale_up.values(), *domains_of(chains, Source.PLATFORM)),
        notes=tuple(note for node in found for note in node.notes),
    )


def items_of(text: str, kind: str) -> list[bytes]:
    """The JSON of each item of that kind: the text may be one, or a list of several kinds."""
    whole = decoded(text, _Kind, f"{kind} of Kubernetes")
    if whole.kind == kind:
        return [text.encode()]
    if not whole.kind.endswith("List"):
        raise ProbeError(f"'{whole.kind:.40}' is no {kind} and no list", hint="give the output of kubectl get -o json")
    items = [bytes(item) for item in decoded(text, _List, f"a list of {kind}").items]
    return [item for item in items if decoded(item, _Kind, f"an item of a list of {kind}").kind == kind]


def _network(labels: Mapping[str, str]) -> tuple[str, list[str]]:
    """The rack, where a label names it, and the levels of the network from the lowest, of the first who told any."""
    for rack, keys in _NETWORKS:
        if levels := [labels[key] for key in keys if labels.get(key)]:
            return labels.get(rack, ""), levels
    for racks, prefix, is_downward in _NUMBERED:
        rack = next((labels[key] for key in racks if labels.get(key)), "")
        tiers = {key.removeprefix(prefix): value for key, value in labels.items() if key.startswith(prefix) and value}
        numbers = sorted((n for n in tiers if re.fullmatch(r"\d{1,3}", n)), key=int, reverse=is_downward)
        if numbers or rack:
            return rack, [tiers[number] for number in numbers]
    return labels.get(f"{_OKE}/host.rack_id", ""), []


def _scale_up(labels: Mapping[str, str], devices: Sequence[Device], host_id: str) -> tuple[list[Domain], list[str]]:
    domains: list[Domain] = []
    notes: list[str] = []
    found = {DomainKind.NVLINK: [labels[key] for key in _GPU_DOMAINS if labels.get(key)]}
    if slice_name := labels.get("ray.io/tpu-slice-name"):
        found[DomainKind.ICI] = [f"{slice_name}/ici0"]  # as `tpu` names it
    members = tuple(device.device_id for device in devices if not device.partition_of)
    for kind, names in found.items():
        if not names:
            continue
        if kind is DomainKind.NVLINK and _NO_DOMAIN.fullmatch(names[0]):
            notes.append(f"{host_id}: the label of NVLink domain '{names[0]}' is that of no fabric, not believed")
        elif not members:
            notes.append(f"{host_id} is labelled with {kind} domain '{names[0]}', but none of its devices is known")
        else:
            domains.append(Domain.told(Source.PLATFORM, domain_id=names[0], kind=kind, members=members))
    return domains, notes
