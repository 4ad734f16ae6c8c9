"""Where a machine is in a cloud's network: the metadata services of AWS, GCP, Azure and OCI, and AWS's list of many.

Each reader takes the answer as the service gives it. Clouds do not name the same things: the lowest level of a network
is called rack here unless the cloud names racks itself, and the levels above it blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from wsync.discovery.reading import Tier, built, decoded, domains_of, network_tiers, text_of
from wsync.errors import ProbeError
from wsync.topology import DomainKind, Host, Source, Topology

Answer = Callable[[str, str, Mapping[str, str]], str]
"""Method, URL and headers to the answer; empty if there is no such thing. `OSError` if nobody answers."""

TIMEOUT_S = 5.0
_SERVICE = "http://169.254.169.254"
_AZURE_TAG = "7783-7084-3265-9085-8269-3286-77"
_NULLS = (None, "", "null")
"""AWS writes the text `null` where it means none."""


class _AwsInstance(msgspec.Struct, frozen=True, rename="pascal"):
    instance_id: str
    instance_type: str = ""
    network_nodes: tuple[str, ...] | None = None
    capacity_block_id: str | None = None
    availability_zone: str = ""


class _AwsAnswer(msgspec.Struct, frozen=True, rename="pascal"):
    instances: tuple[_AwsInstance, ...]
    next_token: str | None = None


class _AwsIdentity(msgspec.Struct, frozen=True, rename="camel"):
    instance_id: str
    instance_type: str
    region: str
    availability_zone: str


class _GceAttributes(msgspec.Struct, frozen=True):
    physical_host: str = ""


class _GceInstance(msgspec.Struct, frozen=True, rename="camel"):
    id: int
    machine_type: str
    zone: str
    attributes: _GceAttributes = _GceAttributes()


class _AzureCompute(msgspec.Struct, frozen=True, rename="camel"):
    vm_id: str
    vm_size: str
    location: str
    zone: str = ""
    placement_group_id: str = ""
    interconnect_group_id: str = ""
    interconnect_subgroup_id: str = ""


class _AzureInstance(msgspec.Struct, frozen=True):
    compute: _AzureCompute


class _OciInstance(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    shape: str
    availability_domain: str = ""
    canonical_region_name: str = ""


class _OciRdma(msgspec.Struct, frozen=True):
    local_block: str = msgspec.field(name="customerLocalBlock", default="")
    network_block: str = msgspec.field(name="customerNetworkBlock", default="")
    island: str = msgspec.field(name="customerHPCIslandId", default="")
    memory_fabric: str | None = msgspec.field(name="customerGpuMemoryFabric", default=None)


class _OciHost(msgspec.Struct, frozen=True, rename="camel"):
    network_block_id: str | None = None
    rack_id: str | None = None
    rdma_topology_data: _OciRdma | None = None


def read_aws_instance_topology(text: str, *, host_ids: Mapping[str, str] | None = None) -> Topology:
    """The answer of `aws ec2 describe-instance-topology`. `host_ids` are by instance id; others keep that as host id.

    Instances of one UltraServer (capacity block) are a rack. Instances that are not running have no place yet.
    """
    answer = decoded(text, _AwsAnswer, "the answer of describe-instance-topology")
    hosts, chains, notes = [], [], []
    for instance in answer.instances:
        host_id = (host_ids or {}).get(instance.instance_id, instance.instance_id)
        hosts.append(_host(host_id, "aws", instance.instance_type, instance.instance_id))
        rack = "" if instance.capacity_block_id in _NULLS else str(instance.capacity_block_id)
        nodes = (instance.network_nodes or ())[::-1]
        if not nodes:
            notes.append(f"{host_id} is at no network node: it is not running, or AWS tells none of its type")
        chains += _chains(host_id, nodes, rack=rack, zone=instance.availability_zone)
    if answer.next_token not in _NULLS:
        notes.append("AWS's list of instances has further pages")
    return _placed("the answer of describe-instance-topology", hosts, chains, notes)


def read_aws_identity(text: str, *, host_id: str) -> Topology:
    """AWS's instance identity document. It tells the zone only: network nodes are in `read_aws_instance_topology`."""
    found = decoded(text, _AwsIdentity, "AWS's identity document")
    host = _host(host_id, "aws", found.instance_type, found.instance_id)
    return _placed("AWS", [host], _chains(host_id, (), zone=found.availability_zone, site=found.region))


def read_gce_instance(text: str, *, host_id: str) -> Topology:
    """GCE's `instance/?recursive=true`. `physical_host` is there only under a placement policy."""
    found = decoded(text, _GceInstance, "GCE's metadata of the instance")
    host = _host(host_id, "gcp", found.machine_type.rsplit("/", 1)[-1], str(found.id))
    where = found.attributes.physical_host
    notes = [] if where else [f"{host_id} has no physical_host: its machine is under no placement policy"]
    chains = _chains(host_id, _gce_tiers(where), zone=found.zone.rsplit("/", 1)[-1])
    return _placed("GCE's metadata", [host], chains, notes)


def read_azure_instance(text: str, *, host_id: str) -> Topology:
    """Azure's `/metadata/instance`. It has no racks; a placement group counts where no interconnect group is told."""
    found = decoded(text, _AzureInstance, "Azure's metadata of the instance").compute
    host = _host(host_id, "azure", found.vm_size, found.vm_id)
    blocks = [found.interconnect_subgroup_id, found.interconnect_group_id]
    tiers = [(DomainKind.BLOCK, name) for name in blocks if name]
    if not tiers and found.placement_group_id:
        tiers = [(DomainKind.BLOCK, found.placement_group_id)]
    place = _place(f"{found.location}-{found.zone}" if found.zone else "", found.location)
    return _placed("Azure's metadata", [host], [(host_id, [*tiers, *place])])


def read_oci_instance(instance: str, host: str, *, host_id: str) -> Topology:
    """OCI's `/opc/v2/instance/` and `/opc/v2/host/`, or its `rdmaTopologyData` alone; `host` may be empty.

    The RDMA network's blocks where they are told, else the network block of the host. A GPU memory fabric is a rack.
    """
    found = decoded(instance, _OciInstance, "OCI's metadata of the instance")
    place = decoded(host or "{}", _OciHost, "OCI's metadata of the host")
    rdma = place.rdma_topology_data or decoded(host or "{}", _OciRdma, "OCI's metadata of the host")
    tiers = tuple(filter(None, (rdma.local_block, rdma.network_block, rdma.island)))
    chains = _chains(
        host_id,
        tiers or tuple(filter(None, (place.network_block_id,))),
        rack=rdma.memory_fabric or place.rack_id or "",
        zone=found.availability_domain.rsplit(":", 1)[-1],
        site=found.canonical_region_name,
    )
    return _placed("OCI's metadata", [_host(host_id, "oci", found.shape, found.id)], chains)


def platform_of(root: Path) -> str:
    """`aws`, `gcp`, `azure`, `oci`, or empty: what the firmware says whose machine this is (`root`/sys/class/dmi)."""
    firmware = {name: text_of(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "chassis_asset_tag")}
    if firmware["sys_vendor"] == "Amazon EC2":
        return "aws"
    if firmware["sys_vendor"] == "Google":
        return "gcp"
    if firmware["chassis_asset_tag"] == _AZURE_TAG:
        return "azure"
    return "oci" if firmware["chassis_asset_tag"] == "OracleCloud.com" else ""


def probe(host_id: str, *, root: Path = Path("/"), answer: Answer | None = None) -> Topology:
    """What the metadata service of this machine's cloud says; empty on other machines, which are not asked anything."""
    platform = platform_of(root)
    ask = answer or _answer
    try:
        if platform == "aws":
            token = ask("PUT", f"{_SERVICE}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"})
            headers = {"X-aws-ec2-metadata-token": token}
            document = ask("GET", f"{_SERVICE}/latest/dynamic/instance-identity/document", headers)
            return read_aws_identity(document, host_id=host_id)
        if platform == "gcp":
            headers = {"Metadata-Flavor": "Google"}
            url = f"{_SERVICE}/computeMetadata/v1/instance/?recursive=true"
            return read_gce_instance(ask("GET", url, headers), host_id=host_id)
        if platform == "azure":
            url = f"{_SERVICE}/metadata/instance?api-version="
            versions = ("2025-11-11", "2021-02-01")  # the first has interconnect groups, and is not everywhere yet
            found = (ask("GET", url + version, {"Metadata": "true"}) for version in versions)
            return read_azure_instance(next(filter(None, found), ""), host_id=host_id)
        if platform == "oci":
            headers = {"Authorization": "Bearer Oracle"}
            instance, host = (ask("GET", f"{_SERVICE}/opc/v2/{what}/", headers) for what in ("instance", "host"))
            return read_oci_instance(instance, host, host_id=host_id)
    except OSError as exc:
        raise ProbeError(
            f"the metadata service of {platform} does not answer: {exc}",
            hint="containers may be kept from it: allow it (AWS: a hop limit of 2), or declare the topology",
        ) from exc
    return Topology()


def _answer(method: str, url: str, headers: Mapping[str, str]) -> str:
    opener = build_opener(ProxyHandler({}))  # a proxy would answer for another machine
    try:
        with opener.open(Request(url, headers=dict(headers), method=method), timeout=TIMEOUT_S) as response:
            return str(response.read().decode("utf-8", errors="replace"))
    except HTTPError as exc:
        exc.close()
        if exc.code in (400, 404):
            return ""
        raise
    except URLError as exc:
        raise OSError(str(exc.reason)) from exc


def _host(host_id: str, platform: str, instance_type: str, instance_id: str) -> Host:
    return Host.told(
        Source.PLATFORM, host_id=host_id, platform=platform, instance_type=instance_type, instance_id=instance_id
    )


def _gce_tiers(where: str) -> tuple[str, ...]:
    """`/block/subblock/host` to its levels, the lowest first; the host is a machine of Google's, not one of ours."""
    parts = where.strip("/").split("/") if where else []
    if where and (len(parts) != 3 or not all(parts)):
        raise ProbeError(f"GCE's physical_host is '{where:.60}'", hint="/block/subblock/host is expected")
    return tuple(parts[1::-1])


def _place(zone: str, site: str) -> list[Tier]:
    return [(kind, name) for kind, name in ((DomainKind.ZONE, zone), (DomainKind.SITE, site)) if name]


def _chains(
    host_id: str, network: tuple[str, ...], *, rack: str = "", zone: str = "", site: str = ""
) -> list[tuple[str, list[Tier]]]:
    """The host's levels of the network below zone and site, and its rack: a chain of its own, it may span levels."""
    chains = [(host_id, [*network_tiers(network, has_rack=bool(rack)), *_place(zone, site)])]
    return [*chains, (host_id, [(DomainKind.RACK, rack)])] if rack else chains


def _placed(what: str, hosts: list[Host], chains: list[tuple[str, list[Tier]]], notes: Sequence[str] = ()) -> Topology:
    return built(what, hosts=tuple(hosts), domains=domains_of(chains, Source.PLATFORM), notes=tuple(notes))
