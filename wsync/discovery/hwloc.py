"""The XML files of hwloc (`lstopo --of xml`): NUMA nodes, and the PCI tree with its GPUs and NICs.

For a host whose sysfs cannot be read, or that is another one. A file is looked for only where hwloc's own variable
names one. As with the file of NCCL, its tree counts as declared; all else was true when it was written.

Its table of NVLink rates is not read: it ends at the switches, and does not say which of these are joined. That of a
DGX-2 shows two halves of what is one domain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from wsync.discovery.hardware import described, identify, identify_nic
from wsync.discovery.pci import SYSFS_SLACK, Place, address, as_seen, distance
from wsync.discovery.reading import built
from wsync.discovery.sources import number
from wsync.errors import ProbeError
from wsync.topology import Device, Host, Link, Nic, NicKind, Source, Topology

VARIABLE = "HWLOC_XMLFILE"
"""What hwloc itself takes such a file from."""

_PCI = re.compile(r"([0-9a-f]{4}) \[([0-9a-f]{4}):([0-9a-f]{4})\].*")
"""`pci_type`: the class and the ids of vendor and device; those of the subsystem and the revision follow."""
_ACCELERATORS = ("0302", "1200")
"""Classes: 3D controller, processing accelerator. A display (0300) may be the board's own."""
_NICS, _INFINIBAND = ("0200", "0207"), "0207"
_NETWORK, _OPENFABRICS = ({"2": "2", "3": "16"}, {"2": "3", "3": "32"})
"""Types of OS device by the first digit of the file's version: hwloc 2 counts them, hwloc 3 has a bit for each."""
_INDEXED = re.compile(r"(?:nvml|rsmi)(\d{1,4})")
"""OS devices that have their driver's index in their name."""
_NAMES = {"google": "tpu", "aws": "neuron", "intel": "gaudi", "groq": "lpu"}
_DEEPEST = 64
_HINT = "write it with 'lstopo --of xml', of hwloc 2 or newer"


class _Found(msgspec.Struct):
    """A PCI device of the file: where it hangs, its element, its class and ids."""

    place: Place
    element: ElementTree.Element
    kind: str
    pci_id: str

    @property
    def pci(self) -> str:
        return self.place.path[-1]

    @property
    def os_devices(self) -> list[ElementTree.Element]:
        return [child for child in self.element.findall("object") if child.get("type") == "OSDev"]


def probe(host_id: str, *, known: Topology | None = None, variables: Mapping[str, str] | None = None) -> Topology:
    """What the file that the environment names says; nothing where it names none.

    With `known`, what others told of this host, it is in their ids, of what is here alone, and of those pairs that
    nobody else knows a link of.
    """
    named = (os.environ if variables is None else variables).get(VARIABLE, "")
    if not named:
        return Topology()
    try:
        text = Path(named).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ProbeError(f"{named} cannot be read: {exc}", hint=f"set {VARIABLE} to a file, or unset it") from exc
    found = read_hwloc(text, host_id=host_id)
    if known is None:
        return found
    found = as_seen(known, found, what="hwloc's file")
    joined = {link.ends for link in known.links}
    return msgspec.structs.replace(found, links=tuple(link for link in found.links if link.ends not in joined))


def read_hwloc(text: str, *, host_id: str) -> Topology:
    """The host, its accelerators and NICs, and what is between them on PCI. Raises ProbeError if it is no such file.

    Accelerators are numbered as their driver does where the file says so, else in the order of PCI addresses. A NIC
    that the system gives no name has its PCI address as name.
    """
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as exc:
        raise ProbeError(f"no file of hwloc: {exc}", hint="give the whole XML file") from exc
    version = root.get("version", "")[:1]
    machine = root.find("object")
    if root.tag != "topology" or machine is None or machine.get("type") != "Machine" or version not in _NETWORK:
        raise ProbeError("no file of hwloc: a <topology> of version 2 or 3 is expected, of one machine", hint=_HINT)
    found = sorted(_functions(machine, (), -1), key=lambda one: one.pci)
    if len({one.pci for one in found}) < len(found):
        raise ProbeError("hwloc: two devices have one PCI address", hint=_HINT)
    accelerators = [one for one in found if _is_accelerator(one)]
    devices, notes = _devices(accelerators, host_id)
    ports = [(nic, one.place) for one in found if one.kind.startswith(_NICS) for nic in _nics(one, host_id, version)]
    places = {device.device_id: one.place for device, one in zip(devices, accelerators, strict=True)}
    nic_places = {nic.nic_id: place for nic, place in ports}
    links = []
    for a, b in [*combinations(places, 2), *((device, nic) for device in places for nic in nic_places)]:
        kind = distance(places[a], places.get(b) or nic_places[b], slack=SYSFS_SLACK)
        links += [Link(a=a, b=b, kind=kind)] if kind else []
    return built(
        "the file of hwloc",
        hosts=(_host(machine, host_id),),
        devices=tuple(devices),
        nics=tuple(nic for nic, _ in ports),
        links=tuple(links),
        notes=tuple(notes),
    )


def _host(machine: ElementTree.Element, host_id: str) -> Host:
    """NUMA nodes are those with processors: GPUs and other memories have nodes of their own."""
    nodes = [one for one in machine.iter("object") if one.get("type") == "NUMANode" and _has_processors(one)]
    memory = sum(number(one.get("local_memory", "0"), "hwloc: local_memory") for one in nodes)
    return Host.told(Source.PLATFORM, host_id=host_id, num_numa_nodes=len(nodes), memory_nbytes=memory)


def _has_processors(node: ElementTree.Element) -> bool:
    return bool(re.search("[1-9a-f]", node.get("cpuset", "").replace("0x", "")))


def _numa_nodes(element: ElementTree.Element) -> Iterator[int]:
    """Those that are attached to this very object, maybe behind a cache of their memory."""
    for child in element.findall("object"):
        if child.get("type") == "NUMANode" and _has_processors(child):
            yield number(child.get("os_index", ""), "hwloc: os_index of a NUMA node", largest=9999)
        elif child.get("type") == "MemCache":
            yield from _numa_nodes(child)


def _functions(element: ElementTree.Element, path: tuple[str, ...], numa_node: int) -> Iterator[_Found]:
    """PCI devices below the object. Their NUMA node is that of the nearest object above that has exactly one."""
    if len(path) > _DEEPEST:
        raise ProbeError(f"hwloc: a tree of more than {_DEEPEST} levels", hint=_HINT)
    nodes = list(_numa_nodes(element))
    if nodes:
        numa_node = nodes[0] if len(nodes) == 1 else -1
    for child in element.findall("object"):
        kind, below = child.get("type", ""), path
        if kind == "Bridge" and child.get("bridge_type", "").startswith("0-"):
            below = (f"host bridge {child.get('bridge_pci', '')}",)
        elif kind in ("Bridge", "PCIDev"):
            here = address(child.get("pci_busid", ""))
            below = (*(path or (f"host bridge {here}",)), here)
        if kind == "PCIDev":
            told = _PCI.fullmatch(child.get("pci_type", ""))
            if told is None:
                raise ProbeError(f"hwloc: {below[-1]} has pci_type '{child.get('pci_type', ''):.40}'", hint=_HINT)
            yield _Found(Place(below, numa_node), child, told[1], f"{told[2]}:{told[3]}")
        elif kind not in ("OSDev", "Misc", "PU"):
            # Objects of the processors nest without end too, and are no part of the path.
            yield from _functions(child, below, numa_node)


def _is_accelerator(found: _Found) -> bool:
    if identify(pci_id=found.pci_id) or found.kind in _ACCELERATORS:
        return True
    return any(_INDEXED.fullmatch(one.get("name", "")) for one in found.os_devices)


def _devices(accelerators: list[_Found], host_id: str) -> tuple[list[Device], list[str]]:
    devices: list[Device] = []
    notes: list[str] = []
    for position, one in enumerate(accelerators):
        told = {info.get("name"): info.get("value", "") for info in one.element.iterfind("object/info")}
        indexes = {found[1] for child in one.os_devices if (found := _INDEXED.fullmatch(child.get("name", "")))}
        index = int(indexes.pop()) if len(indexes) == 1 else -1
        row = identify(pci_id=one.pci_id)
        name = _NAMES.get(row.vendor if row else "", "gpu")
        device = Device.told(
            Source.PLATFORM,
            device_id=f"{host_id}/{name}{position if index < 0 else index}",
            host_id=host_id,
            index=index,
            name=told.get("GPUModel", ""),
            uuid=told.get("NVIDIAUUID", ""),
            pci=one.pci,
            pci_id=one.pci_id,
        )
        node = one.place.numa_node
        numa = Device.told(Source.DECLARED, device_id=device.device_id, host_id=host_id, numa_node=node)
        device, more = described(device.joined(numa))
        devices.append(device)
        notes += more
    return devices, notes


def _nics(found: _Found, host_id: str, version: str) -> Iterator[Nic]:
    """A NIC for each verbs device, else for each network interface, else for the PCI device."""
    by_type: dict[str, list[str]] = {}
    for child in found.os_devices:
        by_type.setdefault(child.get("osdev_type", ""), []).append(child.get("name", ""))
    verbs, interfaces = by_type.get(_OPENFABRICS[version], []), by_type.get(_NETWORK[version], [])
    model = identify_nic(found.pci_id)
    kind = NicKind.INFINIBAND if found.kind == _INFINIBAND else model.kind if model else None
    for name in verbs or interfaces or [""]:
        is_interface = name in interfaces
        nic_id = f"{host_id}/{name or found.pci}"
        nic = Nic.told(
            Source.PLATFORM,
            nic_id=nic_id,
            host_id=host_id,
            kind=NicKind.ETHERNET if is_interface and kind is None else kind,
            name=name,
            netdev=name if is_interface else interfaces[0] if len(verbs) == len(interfaces) == 1 else "",
            pci=found.pci,
            pci_id=found.pci_id,
        )
        node = found.place.numa_node
        yield nic.joined(Nic.told(Source.DECLARED, nic_id=nic_id, host_id=host_id, numa_node=node))
