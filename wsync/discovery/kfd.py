"""AMD GPUs from the tree that their kernel driver (KFD) keeps in sysfs, which needs no library.

A node of it is no GPU but a partition of one: a GPU in CPX mode has as many nodes as compute dies. Nodes of one
`unique_id` are one GPU, GPUs of one `hive_id` are joined by xGMI. What is made of them is in `xgmi`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from wsync.discovery import xgmi
from wsync.discovery.hardware import pci_id_of
from wsync.discovery.reading import text_of
from wsync.discovery.sources import number, pci_function
from wsync.discovery.xgmi import Edge, Package
from wsync.errors import ProbeError
from wsync.topology import Source, Topology

NODES = "class/kfd/kfd/topology/nodes"
LINKS = {11: xgmi.XGMI, 2: xgmi.PCIE}
"""Types of link in the tree that are between GPUs."""
FRAMEBUFFERS = (1, 2)
"""Kinds of memory bank that are the GPU's own memory: visible to the CPU, and not."""
BY_COUNT = {2: "DPX", 3: "TPX", 4: "QPX"}
_HINT = "is this a whole copy of /sys/class/kfd/kfd/topology?"


class Node(NamedTuple):
    """A GPU node of the tree: a GPU or a partition of one."""

    number: int
    unique_id: int
    hive_id: int
    domain: int
    location: int
    pci_id: str
    architecture: str
    num_dies: int
    memory_nbytes: int


def read_kfd(sysfs: Path, *, host_id: str) -> Topology:
    """The GPUs in a sysfs tree; nothing where it has none. Nodes that this container may not read are noted.

    Raises ProbeError where the tree is cut short or has something in it that is not of its form.
    """
    nodes, edges, num_hidden = _tree(sysfs / NODES)
    notes = [f"{host_id}: {num_hidden} nodes of KFD are closed to this process"] if num_hidden else []
    if not nodes:
        return Topology(notes=tuple(notes))
    packages = _packages(nodes, sysfs, is_whole=not num_hidden)
    return xgmi.topology_of(packages, edges, host_id=host_id, source=Source.SYSFS, notes=notes, is_whole=not num_hidden)


def _tree(folder: Path) -> tuple[tuple[Node, ...], tuple[Edge, ...], int]:
    """GPU nodes in the order of their numbers, the links that start at them, and how many nodes are closed to us."""
    names = {number(entry.name, f"{entry}"): entry for entry in folder.iterdir()} if folder.is_dir() else {}
    nodes: list[Node] = []
    edges: list[Edge] = []
    num_hidden = 0
    for i in sorted(names):
        try:
            facts = _properties(names[i] / "properties")
            if not facts:
                raise ProbeError(f"{names[i]} has no properties", hint=_HINT)
            if _fact(facts, "simd_count", names[i]):
                node, links = _node(i, names[i], facts), tuple(_edges(i, names[i]))
                nodes.append(node)
                edges += links
        except PermissionError:
            num_hidden += 1
    for edge in edges:
        if edge.end not in names:
            raise ProbeError(f"node {edge.start} has a link to node {edge.end}, which is not there", hint=_HINT)
    return tuple(nodes), tuple(edges), num_hidden


def _properties(path: Path) -> dict[str, int]:
    """Lines `name number`; empty if there is no such file. `PermissionError` if the node is closed to us."""
    try:
        text = path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError:
        raise
    except OSError as exc:
        raise ProbeError(f"{path} cannot be read: {exc}", hint="look at the kernel's log") from exc
    facts: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if not name or name in facts:
            raise ProbeError(f"{path}: {line!r:.60} is no line of its own", hint=_HINT)
        facts[name] = number(value.strip(), f"{path}: {name}", largest=2**64 - 1)
    return facts


def _fact(facts: Mapping[str, int], name: str, where: Path, *, largest: int = 0xFFFFFFFF) -> int:
    if not 0 <= facts.get(name, -1) <= largest:
        raise ProbeError(f"{where} does not say its {name}, or no believable one", hint=_HINT)
    return facts[name]


def _node(i: int, folder: Path, facts: Mapping[str, int]) -> Node:
    version = _fact(facts, "gfx_target_version", folder)
    banks = [_properties(bank / "properties") for bank in sorted((folder / "mem_banks").glob("*"))]
    return Node(
        number=i,
        unique_id=facts.get("unique_id", 0),
        hive_id=facts.get("hive_id", 0),
        domain=_fact({"domain": 0, **facts}, "domain", folder, largest=0xFFFF),
        location=_fact(facts, "location_id", folder),
        pci_id=pci_id_of(*(_fact(facts, name, folder, largest=0xFFFF) for name in ("vendor_id", "device_id"))),
        # 90402 is 9.4.2, and a step beyond 9 is a letter: gfx942, gfx90a.
        architecture=f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}",
        num_dies=facts.get("num_xcc", 0),
        memory_nbytes=sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in FRAMEBUFFERS),
    )


def _edges(i: int, folder: Path) -> Iterator[Edge]:
    for path in sorted(folder.glob("*_links/*/properties")):
        facts = _properties(path)
        if _fact(facts, "node_from", path) != i:
            raise ProbeError(f"{path} is a link of node {facts['node_from']}", hint=_HINT)
        rates = facts.get("min_bandwidth", 0), facts.get("max_bandwidth", 0)
        kind, end = _fact(facts, "type", path), _fact(facts, "node_to", path)
        yield Edge(LINKS.get(kind, ""), i, end, *rates)


def _packages(nodes: Sequence[Node], sysfs: Path, *, is_whole: bool) -> tuple[Package, ...]:
    """Nodes by GPU. Where the driver gives no unique ids, those at one PCI address are one."""
    groups: dict[tuple[int, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        groups[(node.unique_id,) if node.unique_id else (node.domain, node.location & 0xFFFF)].append(node)
    return tuple(_package(group, sysfs, is_whole=is_whole) for group in groups.values())


def _package(group: Sequence[Node], sysfs: Path, *, is_whole: bool) -> Package:
    """Its size as a whole is known only where the PCI bus tells it."""
    pci = min(_address(node, sysfs) for node in group)
    folder, seen, first = sysfs / "bus/pci/devices" / pci, pci_function(pci, sysfs=sysfs), group[0]
    told = (text_of(folder / f"current_{what}_partition") for what in ("compute", "memory"))
    mode, memory_mode = xgmi.checked_modes(pci, *told)
    if not mode and is_whole and len(group) > 1:
        mode = "CPX" if all(node.num_dies == 1 for node in group) else BY_COUNT.get(len(group), "")
    memory = text_of(folder / "mem_info_vram_total")
    return Package(
        nodes=tuple(xgmi.Node(node.number, node.memory_nbytes) for node in group),
        pci=pci,
        pci_id=first.pci_id,
        mode=mode,
        memory_mode=memory_mode,
        hive_id=first.hive_id,
        # As ROCm prints it.
        uuid=f"GPU-{first.unique_id:016x}" if first.unique_id else "",
        name=text_of(folder / "product_name"),
        architecture=first.architecture,
        numa_node=seen.numa_node if seen else -1,
        memory_nbytes=number(memory, f"{folder}/mem_info_vram_total") if memory else 0,
    )


def _address(node: Node, sysfs: Path) -> str:
    """Some drivers number partitions in the place of the PCI function: then there is no such function on the bus."""
    bus, device, function = node.location >> 8 & 0xFF, node.location >> 3 & 0x1F, node.location & 7
    stem = f"{node.domain:04x}:{bus:02x}:{device:02x}."
    folder = sysfs / "bus/pci/devices"
    is_there = (folder / f"{stem}{function}").is_dir() or not (folder / f"{stem}0").is_dir()
    return f"{stem}{function if is_there else 0}"
