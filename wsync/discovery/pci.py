"""PCI addresses, the tree they hang in, and one id for what two probes name differently at one address."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec

from wsync.discovery.reading import text_of
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, Nic, Topology

_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")

SYSFS_SLACK = 1
"""Bridges of one switch below the one that two of its devices share: sysfs has a switch's ports one by one."""


class Place(msgspec.Struct, frozen=True):
    """Where a device hangs: from its root complex through bridges to itself, and its NUMA node (-1: unknown)."""

    path: tuple[str, ...]
    numa_node: int = -1


def address(text: str) -> str:
    """The address as `dddd:bb:dd.f`: drivers write the domain with four digits, eight or none. Raises ProbeError."""
    found = _ADDRESS.fullmatch(text.strip().lower())
    if found is None:
        raise ProbeError(f"'{text:.40}' is no PCI address", hint="it looks like 0000:1a:00.0")
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}"


def function_of(device: Path) -> Path | None:
    """The directory of the PCI function that a sysfs device is or, for one on a bus of its own (virtio), hangs on."""
    real = device.resolve()
    return next((path for path in (real, *real.parents) if _is_function(path.name)), None)


def place_of(device: Path, *, numa_node: int = -1) -> Place | None:
    """The place of a sysfs device, None if it is on no PCI bus. Without `numa_node` what sysfs says of that."""
    function = function_of(device)
    if function is None:
        return None
    path = tuple(part for part in function.parts if _ROOT.fullmatch(part) or _is_function(part))
    told = text_of(function / "numa_node")
    return Place(path, int(told) if numa_node < 0 and re.fullmatch(r"\d{1,4}", told) else numa_node)


def pci_id_of_function(function: Path) -> str:
    """`10de:2330`, empty where sysfs does not say it."""
    ids = [text_of(function / name) for name in ("vendor", "device")]
    return ":".join(text[2:] for text in ids) if all(re.fullmatch(r"0x[0-9a-f]{4}", text) for text in ids) else ""


def distance(a: Place, b: Place, *, slack: int = 0) -> str:
    """What is between the two, in the words of `nvidia-smi topo -m`; empty where it is not known.

    PIX: one bridge or switch at most. PXB: several, but no host bridge. PHB: a host bridge. NODE: several host bridges
    of one NUMA node. SYS: the link between NUMA nodes. `slack` is how many bridges below the shared one belong to it.
    """
    shared = 0
    for ours, theirs in zip(a.path[:-1], b.path[:-1], strict=False):
        if ours != theirs:
            break
        shared += 1
    if shared == 0:
        if -1 in (a.numa_node, b.numa_node):
            return ""
        return "NODE" if a.numa_node == b.numa_node else "SYS"
    if shared == 1:
        return "PHB"
    below = max(len(a.path), len(b.path)) - 1 - shared
    return "PIX" if below <= slack else "PXB"


def with_ids_of(known: Topology, found: Topology) -> Topology:
    """`found` with the ids of `known` for devices and NICs that are at the same PCI address of the same host.

    For sources that do not know the names of drivers; call it before joining the two. Several ports may share an
    address, and partitions that of their device: those keep their ids.
    """
    there, here = _by_address(known), _by_address(found)
    ids = {name: name for name in [*(d.device_id for d in found.devices), *(n.nic_id for n in found.nics)]}
    for address_, names in here.items():
        theirs = there.get(address_, [])
        if len(names) == len(theirs) == 1:
            ids[names[0]] = theirs[0]
    return msgspec.structs.replace(
        found,
        devices=tuple(
            msgspec.structs.replace(d, device_id=ids[d.device_id], partition_of=ids.get(d.partition_of, ""))
            for d in found.devices
        ),
        nics=tuple(msgspec.structs.replace(n, nic_id=ids[n.nic_id]) for n in found.nics),
        domains=tuple(
            msgspec.structs.replace(d, members=tuple(ids.get(m, m) for m in d.members)) if d.is_scale_up else d
            for d in found.domains
        ),
        links=tuple(msgspec.structs.replace(x, a=ids[x.a], b=ids[x.b]) for x in found.links),
    )


def as_seen(known: Topology, told: Topology, *, what: str) -> Topology:
    """What a file (`what`) says of a whole machine, in the ids of `known`, as far as it is of what is known to be here.

    A container is given some of the devices only, numbered anew. Where none is known of a kind (devices, NICs), the
    file is all that there is of it and stays whole. What is left out is noted.
    """
    wholes = tuple(device for device in known.devices if not device.partition_of)
    at_devices, at_nics = Counter(d.pci for d in wholes if d.pci), Counter(n.pci for n in known.nics if n.pci)
    same = {(nic.nic_id, nic.pci) for nic in known.nics}
    listed = Counter(nic.pci for nic in told.nics)
    devices = tuple(d for d in told.devices if not at_devices or at_devices[d.pci] == 1)
    nics = tuple(
        n for n in told.nics if not at_nics or (n.nic_id, n.pci) in same or at_nics[n.pci] == listed[n.pci] == 1
    )
    hidden = [d.pci for d in told.devices if d not in devices] + [n.pci or n.name for n in told.nics if n not in nics]
    here = {*(device.device_id for device in devices), *(nic.nic_id for nic in nics)}
    note = f"{what}: no device or NIC of {told.hosts[0].host_id} is the one at {', '.join(hidden)}" if hidden else ""
    told = msgspec.structs.replace(
        told,
        devices=devices,
        nics=nics,
        domains=_within(told.domains, here),
        links=tuple(link for link in told.links if link.ends <= here),
        notes=(*told.notes, *filter(None, (note,))),
    )
    return with_ids_of(Topology(hosts=known.hosts, devices=wholes, nics=known.nics), told)


def _within(domains: tuple[Domain, ...], here: set[str]) -> tuple[Domain, ...]:
    """The domains with those members only that are here; one alone is in no domain."""
    less = [msgspec.structs.replace(d, members=tuple(m for m in d.members if m in here)) for d in domains]
    return tuple(domain for domain in less if len(domain.members) > 1)


def _is_function(part: str) -> bool:
    return part.count(":") == 2 and _ADDRESS.fullmatch(part) is not None


def _id(record: Device | Nic) -> str:
    return record.device_id if isinstance(record, Device) else record.nic_id


def _by_address(topology: Topology) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    records: tuple[Device | Nic, ...] = (*topology.devices, *topology.nics)
    for record in records:
        if record.pci:
            found.setdefault((record.host_id, record.pci), []).append(_id(record))
    return found
