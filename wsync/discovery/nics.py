"""Network ports as the kernel knows them: verbs devices (InfiniBand, RoCE, EFA) and Ethernet, from sysfs.

A verbs device is told by its driver and its port, not by its name or its network interface: pods have no interface of
an RDMA device, and an InfiniBand port carries traffic while its interface is down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from wsync.discovery.hardware import identify_nic
from wsync.discovery.pci import Place, function_of, pci_id_of_function, place_of
from wsync.discovery.reading import built, text_of
from wsync.discovery.skus import GBIT
from wsync.errors import ProbeError
from wsync.topology import Host, Nic, NicKind, Source, Topology

_ACTIVE = 4
_EFA_CONSTANT = "100 Gb/sec (4X EDR)"
_EFA_OF_100_GBIT = ("1d0f:efa0", "1d0f:efa1")
_KINDS = {"InfiniBand": NicKind.INFINIBAND, "Ethernet": NicKind.ROCE}


class _Port(msgspec.Struct):
    """A NIC and where it is in the PCI tree, which orders the rails."""

    nic: Nic
    path: tuple[str, ...]


def probe(host_id: str) -> Topology:
    return read_nics(Path("/"), host_id=host_id)


def read_nics(root: Path, *, host_id: str) -> Topology:
    """The ports below `root`/sys/class, which may be a copy of a real tree: RDMA ports first, both in PCI order.

    Interfaces without hardware (loopback, bridges, a container's veth) are no NICs. Raises ProbeError where a port does
    not say its state, rate or link layer in the kernel's form.
    """
    notes: list[str] = []
    ports = [port for path in _entries(root / "sys/class/infiniband") for port in _rdma_ports(path, host_id, notes)]
    ports.sort(key=lambda port: (port.nic.numa_node, port.path, port.nic.nic_id))
    nics = [*_with_rails(ports, notes), *_ethernet(root / "sys/class/net", host_id, ports, notes)]
    if not nics and not notes:
        return Topology()
    return built(f"sysfs of '{host_id}'", hosts=(Host(host_id=host_id),), nics=tuple(nics), notes=tuple(notes))


def _rdma_ports(path: Path, host_id: str, notes: list[str]) -> Iterator[_Port]:
    device = path / "device"
    pci_id = _pci_id(device)
    driver = (device / "driver").resolve().name if (device / "driver").exists() else ""
    is_efa = driver == "efa" or (not driver and _kind_of(pci_id) is NicKind.EFA)
    place = place_of(device)
    ports = _entries(path / "ports")
    if not ports:
        raise ProbeError(f"{path} has no ports", hint="mount the whole of /sys")
    for port in ports:
        name = path.name if len(ports) == 1 else f"{path.name}:{port.name}"
        is_up = _is_active(port)
        rate = _rate(port)
        if rate and not is_up:
            notes.append(f"{host_id}/{name} is not active: its rate is not believed")
            rate = 0.0
        elif is_efa and pci_id not in _EFA_OF_100_GBIT and text_of(port / "rate") == _EFA_CONSTANT:
            notes.append(
                f"{host_id}/{name}: older EFA drivers say 100 Gbit/s of every device, not believed of this one"
            )
            rate = 0.0
        nic = Nic.told(
            Source.SYSFS,
            nic_id=f"{host_id}/{name}",
            host_id=host_id,
            kind=NicKind.EFA if is_efa else _kind_of_port(port, notes),
            name=name,
            netdev=_netdev(device, port, is_only=len(ports) == 1),
            pci=place.path[-1] if place else "",
            pci_id=pci_id,
            numa_node=place.numa_node if place else -1,
            nbytes_per_s=rate,
            is_up=is_up,
        )
        yield _Port(nic, place.path if place else ())


def _with_rails(ports: list[_Port], notes: list[str]) -> list[Nic]:
    """The NICs, where those of the fabric have their place in PCI order as rail.

    The fabric is made of the ports of one kind and model that carry most together; a port that is down keeps its place.
    Storage NICs of the very same model are counted too: on hosts of one shape that moves all rails alike. Where two
    sets carry the same, none is known to be the fabric.
    """
    groups: dict[tuple[NicKind | None, str], list[_Port]] = {}
    for port in ports:
        if port.path:
            groups.setdefault((port.nic.kind, port.nic.pci_id), []).append(port)
    sizes = {key: (len(group) * max(p.nic.nbytes_per_s for p in group), len(group)) for key, group in groups.items()}
    largest = [key for key, size in sizes.items() if size == max(sizes.values())]
    if len(largest) > 1:
        notes.append("two kinds of RDMA NICs carry the same: which of them is the fabric is not known, no rails")
    fabric = groups[largest[0]] if len(largest) == 1 else []
    rails = {port.nic.nic_id: rail for rail, port in enumerate(fabric)}
    found = []
    for port in ports:
        nic = port.nic
        if nic.nic_id in rails:
            rail = Nic.told(Source.SYSFS, nic_id=nic.nic_id, host_id=nic.host_id, rail=rails[nic.nic_id])
            nic = nic.joined(rail)
        found.append(nic)
    return found


def _ethernet(path: Path, host_id: str, ports: list[_Port], notes: list[str]) -> list[Nic]:
    """Interfaces of hardware that is no RDMA port and no part of a bond that is one."""
    taken_pci = {port.nic.pci for port in ports} - {""}
    taken = {port.nic.netdev for port in ports} - {""}
    found: list[_Port] = []
    virtual: list[str] = []
    for entry in _entries(path):
        device, master = entry / "device", entry / "master"
        place = place_of(device) if device.exists() else None
        if place is None:
            virtual += [entry.name] if entry.name != "lo" and text_of(entry / "operstate") == "up" else []
            continue
        if place.path[-1] in taken_pci or (master.exists() and master.resolve().name in taken):
            continue
        found.append(_Port(_interface(entry, host_id, place), place.path))
    if virtual and not found and not ports:
        notes.append(f"{host_id} shows no NIC: {', '.join(virtual)} may have one outside the container")
    found.sort(key=lambda port: (port.nic.numa_node, port.path, port.nic.nic_id))
    return [port.nic for port in found]


def _interface(entry: Path, host_id: str, place: Place) -> Nic:
    state = text_of(entry / "operstate")
    speed = text_of(entry / "speed")
    if not re.fullmatch(r"-?\d{1,12}|", speed):
        raise ProbeError(f"{entry}/speed is '{speed:.40}'", hint="a number of Mbit/s is expected there")
    return Nic.told(
        Source.SYSFS,
        nic_id=f"{host_id}/{entry.name}",
        host_id=host_id,
        kind=NicKind.ETHERNET,
        name=entry.name,
        netdev=entry.name,
        pci=place.path[-1],
        pci_id=_pci_id(entry / "device"),
        numa_node=place.numa_node,
        nbytes_per_s=max(int(speed or 0), 0) * GBIT / 1000 if state == "up" else 0.0,
        is_up={"up": True, "down": False}.get(state),
    )


def _is_active(port: Path) -> bool:
    state = text_of(port / "state")
    found = re.fullmatch(r"(\d): \w+", state)
    if found is None:
        raise ProbeError(f"{port}/state is '{state:.40}'", hint="'4: ACTIVE' or the like is expected there")
    return int(found[1]) == _ACTIVE


def _rate(port: Path) -> float:
    rate = text_of(port / "rate")
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec(?: \(.*\))?", rate)
    if found is None:
        raise ProbeError(f"{port}/rate is '{rate:.40}'", hint="'400 Gb/sec (4X NDR)' or the like is expected there")
    return float(found[1]) * GBIT


def _kind_of_port(port: Path, notes: list[str]) -> NicKind | None:
    layer = text_of(port / "link_layer")
    if not layer:
        raise ProbeError(f"{port}/link_layer says nothing", hint="mount the whole of /sys")
    if layer not in _KINDS:
        notes.append(f"{port.parent.parent.name} has link layer '{layer:.40}', of which wsync knows nothing")
    return _KINDS.get(layer)


def _netdev(device: Path, port: Path, *, is_only: bool) -> str:
    """The port's interface: what the kernel lists at its first GID, else the only one of the device."""
    if listed := text_of(port / "gid_attrs/ndevs/0"):
        return listed
    names = [entry.name for entry in _entries(device / "net")]
    return names[0] if is_only and len(names) == 1 else ""


def _kind_of(pci_id: str) -> NicKind | None:
    model = identify_nic(pci_id) if pci_id else None
    return model.kind if model else None


def _pci_id(device: Path) -> str:
    function = function_of(device)
    return pci_id_of_function(function) if function else ""


def _entries(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []
