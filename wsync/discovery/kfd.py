"""AMD GPUs from the tree that their kernel driver (KFD) keeps in sysfs, which needs no library.

A node of it is no GPU but a partition of one: a GPU in CPX mode has as many nodes as compute dies. Nodes of one
`unique_id` are one GPU, GPUs of one `hive_id` are joined by xGMI.

`gpu{index}` is what the driver's numbers count and a process can open: a whole GPU, or a partition. A GPU that is
partitioned has a record of its own besides, `package{number}`, which has the links and all of the memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wsync.discovery.hardware import described, identify, pci_id_of
from wsync.discovery.reading import built, text_of
from wsync.discovery.sources import number, pci_function
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Source, Topology

NODES = "class/kfd/kfd/topology/nodes"
XGMI, PCIE = 11, 2
"""Types of link in the tree."""
FRAMEBUFFERS = (1, 2)
"""Kinds of memory bank that are the GPU's own memory: visible to the CPU, and not."""
MB = 10**6
MODES = {2: "DPX", 3: "TPX", 4: "QPX"}
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


class Edge(NamedTuple):
    """A link between two nodes, in one direction; rates in MB/s, 0 where the driver does not say."""

    kind: int
    start: int
    end: int
    slowest: int
    fastest: int


class Package(NamedTuple):
    """A GPU as a whole: its nodes, its address, and its partition mode, empty if it has none or if that is unknown."""

    nodes: tuple[Node, ...]
    pci: str
    mode: str

    @property
    def uuid(self) -> str:
        """As ROCm prints it."""
        return f"GPU-{self.nodes[0].unique_id:016x}" if self.nodes[0].unique_id else ""

    @property
    def is_partitioned(self) -> bool:
        return len(self.nodes) > 1 or self.mode not in ("", "SPX")


def read_kfd(sysfs: Path, *, host_id: str) -> Topology:
    """The GPUs in a sysfs tree; nothing where it has none. Nodes that this container may not read are noted.

    Raises ProbeError where the tree is cut short or has something in it that is not of its form.
    """
    nodes, edges, num_hidden = _tree(sysfs / NODES)
    notes = [f"{host_id}: {num_hidden} nodes of KFD are closed to this process"] if num_hidden else []
    if not nodes:
        return Topology(notes=tuple(notes))
    packages = _packages(nodes, sysfs, is_whole=not num_hidden)
    index = {node.number: i for i, node in enumerate(nodes)}
    body = {
        node.number: f"{host_id}/package{i}" if package.is_partitioned else f"{host_id}/gpu{index[node.number]}"
        for i, package in enumerate(packages)
        for node in package.nodes
    }
    pairs = _pairs(edges, body)
    devices: list[Device] = []
    for package in packages:
        name = body[package.nodes[0].number]
        facts = _facts(package, sysfs, host_id)
        # Links to nodes that are closed to us may be several to one GPU.
        num_links, link_rate = (0, 0.0) if num_hidden else _ports(name, pairs)
        whole = {"uuid": package.uuid, "num_links": num_links, "link_nbytes_per_s": link_rate, **facts}
        if package.is_partitioned:
            devices.append(Device.told(Source.SYSFS, device_id=name, **whole))
        for node in package.nodes:
            told: dict[str, Any] = {"index": index[node.number], "partition_mode": package.mode}
            if package.is_partitioned:
                told |= facts | {"partition_of": name, "memory_nbytes": node.memory_nbytes}
            else:
                told = {"memory_nbytes": node.memory_nbytes} | told | whole
            devices.append(Device.told(Source.SYSFS, device_id=f"{host_id}/gpu{index[node.number]}", **told))
    devices = [_with_table(device, notes) for device in devices]
    return built(
        "KFD",
        hosts=(Host(host_id=host_id),),
        devices=tuple(devices),
        domains=tuple(_hives(host_id, packages, index, body, pairs, notes)),
        links=tuple(_links(pairs)),
        notes=tuple(notes),
    )


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
        yield Edge(_fact(facts, "type", path), i, _fact(facts, "node_to", path), *rates)


def _packages(nodes: Sequence[Node], sysfs: Path, *, is_whole: bool) -> tuple[Package, ...]:
    """Nodes by GPU. Where the driver gives no unique ids, those at one PCI address are one."""
    groups: dict[tuple[int, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        groups[(node.unique_id,) if node.unique_id else (node.domain, node.location & 0xFFFF)].append(node)
    packages = []
    for group in groups.values():
        pci = min(_address(node, sysfs) for node in group)
        mode = text_of(sysfs / "bus/pci/devices" / pci / "current_compute_partition")
        if mode not in ("", "SPX", "CPX", *MODES.values()):
            raise ProbeError(f"{pci} is in a partition mode '{mode:.20}' that is not known")
        if not mode and is_whole and len(group) > 1:
            mode = "CPX" if all(node.num_dies == 1 for node in group) else MODES.get(len(group), "")
        packages.append(Package(tuple(group), pci, mode))
    return tuple(packages)


def _address(node: Node, sysfs: Path) -> str:
    """Some drivers number partitions in the place of the PCI function: then there is no such function on the bus."""
    bus, device, function = node.location >> 8 & 0xFF, node.location >> 3 & 0x1F, node.location & 7
    stem = f"{node.domain:04x}:{bus:02x}:{device:02x}."
    folder = sysfs / "bus/pci/devices"
    is_there = (folder / f"{stem}{function}").is_dir() or not (folder / f"{stem}0").is_dir()
    return f"{stem}{function if is_there else 0}"


def _facts(package: Package, sysfs: Path, host_id: str) -> dict[str, Any]:
    """What holds of a GPU and of its partitions; sizes of the whole only where the PCI bus tells them."""
    seen = pci_function(package.pci, sysfs=sysfs)
    folder = sysfs / "bus/pci/devices" / package.pci
    memory = text_of(folder / "mem_info_vram_total")
    facts: dict[str, Any] = {
        "host_id": host_id,
        "vendor": "amd",
        "name": text_of(folder / "product_name"),
        "architecture": package.nodes[0].architecture,
        "pci": package.pci,
        "pci_id": package.nodes[0].pci_id,
        "numa_node": seen.numa_node if seen else -1,
    }
    return facts | ({"memory_nbytes": number(memory, f"{folder}/mem_info_vram_total")} if memory else {})


def _with_table(device: Device, notes: list[str]) -> Device:
    device, more = described(device)
    notes += more
    return device


Pairs = Mapping[tuple[str, str, int], Edge]


def _pairs(edges: Sequence[Edge], body: Mapping[int, str]) -> Pairs:
    """The fastest link of each kind between each two GPUs; those inside one say no more than `partition_of` does."""
    pairs: dict[tuple[str, str, int], Edge] = {}
    for edge in edges:
        a, b = body.get(edge.start), body.get(edge.end)
        if a is None or b is None or a == b or edge.kind not in (XGMI, PCIE):
            continue
        key = (min(a, b), max(a, b), edge.kind)
        if key not in pairs or pairs[key].fastest < edge.fastest:
            pairs[key] = edge
    return pairs


def _ports(device_id: str, pairs: Pairs) -> tuple[int, float]:
    """xGMI links of one GPU and the rate of one: a peer's fastest rate is that of all links to it, its slowest of one.

    A peer without rates counts as one link, which there is at least.
    """
    peers = [edge for (a, b, kind), edge in pairs.items() if kind == XGMI and device_id in (a, b)]
    rates = {edge.slowest for edge in peers}
    rate = rates.pop() if len(rates) == 1 else 0
    if rate and all(edge.fastest >= rate and edge.fastest % rate == 0 for edge in peers):
        return sum(edge.fastest // rate for edge in peers), float(rate * MB)
    return len(peers), 0.0


def _links(pairs: Pairs) -> Iterator[Link]:
    for (a, b, kind), edge in sorted(pairs.items()):
        name = "XGMI" if kind == XGMI else "PCIE"
        yield Link.told(Source.SYSFS, a=a, b=b, kind=name, nbytes_per_s=float(edge.fastest * MB))


def _hives(
    host_id: str,
    packages: Sequence[Package],
    index: Mapping[int, int],
    body: Mapping[int, str],
    pairs: Pairs,
    notes: list[str],
) -> Iterator[Domain]:
    """What can be opened of the GPUs of one hive, as far as each has an xGMI link to another one of it."""
    hives: dict[int, list[Package]] = defaultdict(list)
    for package in packages:
        if package.nodes[0].hive_id:
            hives[package.nodes[0].hive_id].append(package)
    joined = {end for a, b, kind in pairs if kind == XGMI for end in (a, b)}
    for hive_id, inside in hives.items():
        for package in list(inside) if len(inside) > 1 else ():
            if body[package.nodes[0].number] not in joined:
                inside.remove(package)
                notes.append(
                    f"{body[package.nodes[0].number]}: in hive {hive_id:016x}, but with no xGMI link to the others"
                )
        name: dict[str, Any] = {"domain_id": f"xgmi-{hive_id:016x}", "kind": DomainKind.XGMI}
        members = tuple(f"{host_id}/gpu{index[node.number]}" for package in inside for node in package.nodes)
        if members:
            yield Domain.told(Source.SYSFS, members=members, **name).joined(_rate(inside, body, pairs, name))


def _rate(inside: Sequence[Package], body: Mapping[int, str], pairs: Pairs, name: Mapping[str, Any]) -> Domain:
    """What the slowest GPU sends to the others together; unknown for partitions, which share their GPU's links."""
    if any(package.is_partitioned for package in inside):
        return Domain(**name)
    sums = []
    for package in inside:
        mine = body[package.nodes[0].number]
        rates = [edge.fastest for (a, b, kind), edge in pairs.items() if kind == XGMI and mine in (a, b)]
        sums.append(sum(rates) if all(rates) else 0)
    if all(sums):
        return Domain.told(Source.SYSFS, nbytes_per_s=float(min(sums) * MB), **name)
    row = identify(pci_id=inside[0].nodes[0].pci_id)
    share = (len(inside) - 1) / (row.domain_size - 1) if row and row.domain_size > 1 else 0.0
    return Domain.told(Source.TABLE, nbytes_per_s=row.scale_up_nbytes_per_s * share if row else 0.0, **name)
