"""The topology files of NCCL and RCCL (`NCCL_TOPO_FILE`, `NCCL_TOPO_DUMP_FILE`): PCI tree, GPUs, NICs and their links.

In virtual machines of Azure and AWS the PCI tree of the kernel is flat, and such a file has the real one: its tree
counts as declared, to be believed before sysfs. All else in it was true when it was written, and gives way to drivers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from wsync.discovery.hardware import identify_nic
from wsync.discovery.nvlink import islands
from wsync.discovery.pci import Place, address, as_seen, distance
from wsync.discovery.reading import built
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Nic, NicKind, Source, Topology

DEFAULT_FILE = "var/run/nvidia-topologyd/virtualTopology.xml"
"""Where NCCL looks when no file is named."""

_MBIT = 1e6 / 8
_DEEPEST = 64
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
_INFINIBAND_CLASS = "0x0207"
_NIC_CLASSES = ("0x0200", _INFINIBAND_CLASS)
_NVSWITCH_CLASS = "0x068000"
_FABRICS = {"nvlink": DomainKind.NVLINK, "xgmi": DomainKind.XGMI}


class _Found(msgspec.Struct):
    """A PCI function of the file: its place, its element, and the NUMA node that it is below."""

    place: Place
    element: ElementTree.Element

    @property
    def pci(self) -> str:
        return self.place.path[-1]


def probe(host_id: str, *, known: Topology | None = None, root: Path = Path("/")) -> Topology:
    """What the file that NCCL would read says.

    With `known`, what drivers and sysfs told of this host, it is in their ids and of what is here alone: the file is of
    the whole machine, and a container may have been given some of it.
    """
    named = os.environ.get("NCCL_TOPO_FILE", "")
    path = Path(named) if named else root / DEFAULT_FILE
    if not named and not path.exists():
        return Topology()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ProbeError(f"{path} cannot be read: {exc}", hint="set NCCL_TOPO_FILE to a file, or unset it") from exc
    found = read_nccl_xml(text, host_id=host_id)
    return found if known is None else as_seen(known, found, what="NCCL's file")


def read_nccl_xml(text: str, *, host_id: str) -> Topology:
    """GPUs, NICs, their NUMA nodes and links. GPUs are numbered by their `dev`, else in the order of PCI addresses.

    A NIC that the file gives no name has its PCI address as name. Raises ProbeError if the text is not such a file or
    tells of several hosts.
    """
    try:
        system = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as exc:
        raise ProbeError(f"no topology file of NCCL: {exc}", hint="give the whole XML file") from exc
    if system.tag != "system" or not system.findall("cpu"):
        raise ProbeError("no topology file of NCCL: a <system> of <cpu> is expected", hint="is it another XML file?")
    if len({cpu.get("host_hash") for cpu in system.findall("cpu")}) > 1:
        raise ProbeError("a topology file of several hosts", hint="dump one with NCCL_TOPO_DUMP_FILE on one host alone")
    functions = [found for cpu in system.findall("cpu") for found in _functions(cpu, _root_of(cpu))]
    by_pci = {found.pci: found.place for found in functions}
    if len(by_pci) < len(functions):
        raise ProbeError("the topology file of NCCL has a PCI address twice", hint="correct the file")
    gpus = [found for found in functions if _is_of(found, _GPU_CLASSES) or found.element.find("gpu") is not None]
    gpus.sort(key=lambda gpu: gpu.pci)
    devices = _devices(gpus, host_id)
    nics = [nic for found in functions for nic in _nics(found, host_id)]
    nics += [_nic(net, host_id) for net in system.iterfind("cpu/nic/net")]
    domains, links, notes = _fabrics(dict(zip([gpu.pci for gpu in gpus], devices, strict=True)), gpus, host_id)
    places = {device.device_id: gpu.place for device, gpu in zip(devices, gpus, strict=True)}
    nic_places = {nic.nic_id: by_pci[nic.pci] for nic in nics if nic.pci}
    joined = {link.ends for link in links}
    pairs = [*combinations(places, 2), *((device, nic) for device in places for nic in nic_places)]
    for a, b in pairs:
        if frozenset((a, b)) not in joined:
            kind = distance(places[a], places.get(b) or nic_places[b])
            links += [Link(a=a, b=b, kind=kind)] if kind else []
    return built(
        "the topology file of NCCL",
        hosts=(Host(host_id=host_id),),
        devices=tuple(devices),
        nics=tuple(nics),
        domains=tuple(domains),
        links=tuple(links),
        notes=tuple(notes),
    )


def _root_of(cpu: ElementTree.Element) -> Place:
    numa = cpu.get("numaid", "")
    if not re.fullmatch(r"-1|\d{1,4}", numa):
        raise ProbeError(f"a <cpu> has numaid '{numa:.40}'", hint="a number is expected there")
    return Place((f"cpu{numa}",), int(numa))


def _functions(element: ElementTree.Element, above: Place) -> Iterator[_Found]:
    if len(above.path) > _DEEPEST:
        raise ProbeError(
            f"a <pci> tree of more than {_DEEPEST} levels", hint="give the whole XML file as it was written"
        )
    for child in element.findall("pci"):
        place = Place((*above.path, address(child.get("busid", ""))), above.numa_node)
        yield _Found(place, child)
        yield from _functions(child, place)


def _is_of(found: _Found, classes: tuple[str, ...]) -> bool:
    return found.element.get("class", "").startswith(classes)


def _pci_id(element: ElementTree.Element) -> str:
    """Clouds write 0x0000 or 0xffff where they do not tell."""
    ids = [element.get(name, "") for name in ("vendor", "device")]
    told = all(re.fullmatch(r"0x[0-9a-f]{4}", text) and text not in ("0x0000", "0xffff") for text in ids)
    return ":".join(text[2:] for text in ids) if told else ""


def _devices(gpus: list[_Found], host_id: str) -> list[Device]:
    devices = []
    for number, found in enumerate(gpus):
        gpu = found.element.find("gpu")
        dev = "" if gpu is None else gpu.get("dev", "")
        if gpu is not None and not re.fullmatch(r"\d{1,4}", dev):
            raise ProbeError(f"the GPU at {found.pci} has dev '{dev:.40}'", hint="a number is expected there")
        device_id = f"{host_id}/gpu{dev or number}"
        device = Device.told(
            Source.PLATFORM,
            device_id=device_id,
            host_id=host_id,
            index=int(dev) if dev else -1,
            architecture="" if gpu is None else gpu.get("gcn", ""),
            pci=found.pci,
            pci_id=_pci_id(found.element),
            num_links=sum(_count(link) for name in _FABRICS for link in found.element.iterfind(f"gpu/{name}")),
        )
        numa = Device.told(Source.DECLARED, device_id=device_id, host_id=host_id, numa_node=found.place.numa_node)
        devices.append(device.joined(numa))
    return devices


def _nics(found: _Found, host_id: str) -> Iterator[Nic]:
    nets = found.element.findall("nic/net")
    if not nets and _is_of(found, _NIC_CLASSES):
        yield _nic(ElementTree.Element("net"), host_id, found)
    for net in nets:
        yield _nic(net, host_id, found)


def _nic(net: ElementTree.Element, host_id: str, found: _Found | None = None) -> Nic:
    pci = found.pci if found else ""
    name = net.get("name", "")
    speed = net.get("speed", "0")
    if not re.fullmatch(r"\d{1,9}", speed) or not (name or pci):
        raise ProbeError(
            f"a <net> has name '{name:.40}' and speed '{speed:.40}'", hint="a name and Mbit/s are expected"
        )
    pci_id = _pci_id(found.element) if found else ""
    model = identify_nic(pci_id) if pci_id else None
    nic_id = f"{host_id}/{name or pci}"
    nic = Nic.told(
        Source.PLATFORM,
        nic_id=nic_id,
        host_id=host_id,
        kind=NicKind.INFINIBAND if found and _is_of(found, (_INFINIBAND_CLASS,)) else model.kind if model else None,
        name=name,
        pci=pci,
        pci_id=pci_id,
        nbytes_per_s=int(speed) * _MBIT,
    )
    numa_node = found.place.numa_node if found else -1
    return nic.joined(Nic.told(Source.DECLARED, nic_id=nic_id, host_id=host_id, numa_node=numa_node))


def _count(link: ElementTree.Element) -> int:
    count = link.get("count", "")
    if not re.fullmatch(r"\d{1,3}", count):
        raise ProbeError(f"a <{link.tag}> has count '{count:.40}'", hint="a number of links is expected there")
    return int(count)


def _fabrics(
    devices: dict[str, Device], gpus: list[_Found], host_id: str
) -> tuple[list[Domain], list[Link], list[str]]:
    """Links per pair of GPUs, and the islands that they make: a GPU without links is in none."""
    domains: list[Domain] = []
    links: list[Link] = []
    notes: list[str] = []
    for tag, kind in _FABRICS.items():
        counts, strangers = _pair_counts(tag, devices, gpus)
        notes += [f"{host_id}: {tag} to {target}, which is no GPU of the file, is not believed" for target in strangers]
        for (a, b), count in counts.items():
            name = f"NV{count}" if kind is DomainKind.NVLINK else "XGMI"
            links.append(Link(a=devices[a].device_id, b=devices[b].device_id, kind=name))
        for number, island in enumerate(_islands(list(devices), counts)):
            members = tuple(devices[pci].device_id for pci in island)
            domain_id = f"{host_id}/{tag}{number}"
            domains.append(Domain.told(Source.PLATFORM, domain_id=domain_id, kind=kind, members=members))
    return domains, links, notes


def _islands(names: list[str], counts: dict[tuple[str, str], int]) -> list[list[str]]:
    groups = islands(names, lambda a, b: (min(a, b), max(a, b)) in counts)
    return [group for group in groups if len(group) > 1]


def _pair_counts(
    tag: str, devices: dict[str, Device], gpus: list[_Found]
) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Links between two GPUs, also those through the switches, of which each joins all GPUs that are at any of them."""
    direct: dict[tuple[str, str], int] = {}
    switched: dict[str, int] = {}
    strangers: list[str] = []
    for gpu in gpus:
        for link in gpu.element.iterfind(f"gpu/{tag}"):
            target = link.get("target", "")
            if link.get("tclass") == _NVSWITCH_CLASS:
                switched[gpu.pci] = switched.get(gpu.pci, 0) + _count(link)
            elif (peer := address(target)) in devices and peer != gpu.pci:
                pair = (gpu.pci, peer) if gpu.pci < peer else (peer, gpu.pci)
                direct[pair] = _count(link)
            else:
                strangers.append(target)
    for a, b in combinations(sorted(switched), 2):
        direct[a, b] = direct.get((a, b), 0) + min(switched[a], switched[b])
    return {pair: count for pair, count in direct.items() if count}, strangers
