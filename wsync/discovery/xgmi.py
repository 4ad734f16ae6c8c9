"""AMD GPUs, the partitions that they are cut into, and the hives that xGMI joins: what KFD and amdsmi tell alike.

Both count nodes, and a node is what a process can open: a whole GPU or a partition. HIP numbers nodes, not GPUs, in
that order: this is their `index`. Ids go by GPU instead: `gpu{n}` is the n-th GPU, `gpu{n}/part{i}` the i-th partition
of one that is cut. Such a GPU has the links and all of the memory, and no index: nobody can open it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from wsync.discovery.hardware import described, identify
from wsync.discovery.reading import built
from wsync.errors import ProbeError
from wsync.topology import Device, Domain, DomainKind, Host, Link, Source, Topology

XGMI, PCIE = "XGMI", "PCIE"
MODES = ("SPX", "DPX", "TPX", "QPX", "CPX")
"""How the compute dies are shared out: to one partition, two, three, four, or each to its own."""
UNTOLD = ("", "N/A", "UNKNOWN")
MB = 10**6


class Node(NamedTuple):
    """A GPU or a partition of one; sizes are 0 where nobody tells them."""

    number: int
    memory_nbytes: int = 0


class Edge(NamedTuple):
    """A link between two nodes, in one direction. `kind` is empty for one that is of no use between GPUs.

    Rates are in MB/s, 0 where nobody tells them.
    """

    kind: str
    start: int
    end: int
    slowest: int
    fastest: int


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as a whole, and its nodes. `memory_nbytes` is of all of it, 0 where only the nodes tell of theirs."""

    nodes: tuple[Node, ...]
    pci: str
    pci_id: str
    mode: str = ""
    """Of `MODES`, empty if it has none or if that is unknown."""
    memory_mode: str = ""
    """`NPS1`, `NPS4`, ...: into how many NUMA nodes its memory is cut."""
    hive_id: int = 0
    uuid: str = ""
    name: str = ""
    architecture: str = ""
    numa_node: int = -1
    memory_nbytes: int = 0

    @property
    def is_partitioned(self) -> bool:
        return len(self.nodes) > 1 or self.mode not in ("", "SPX")

    @property
    def modes(self) -> str:
        """As AMD writes both: `CPX/NPS4`."""
        return "/".join(filter(None, (self.mode, self.memory_mode)))


class _Ids(NamedTuple):
    """By number of the node: the GPU that it is of, its own id, and its place among all nodes of the host."""

    whole: Mapping[int, str]
    own: Mapping[int, str]
    order: Mapping[int, int]


def checked_modes(where: str, compute: str, memory: str) -> tuple[str, str]:
    """The two modes as a package has them; a ProbeError for one that is none."""
    compute, memory = ("" if mode in UNTOLD else mode for mode in (compute, memory))
    if (compute and compute not in MODES) or not re.fullmatch("(NPS[1-9])?", memory):
        raise ProbeError(f"{where} is in a partition mode '{compute:.20}/{memory:.20}' that is not known")
    return compute, memory


def topology_of(
    packages: Sequence[Package],
    edges: Sequence[Edge],
    *,
    host_id: str,
    source: Source,
    notes: Sequence[str] = (),
    is_whole: bool = True,
) -> Topology:
    """GPUs in the order of their first node, their partitions, links and hives.

    Unless the host `is_whole`, some nodes are hidden: how many links a GPU has is then not to be told.
    """
    packages = sorted(packages, key=lambda package: package.nodes[0].number)
    ids = _ids(packages, host_id)
    pairs = _pairs(edges, ids.whole)
    devices: list[Device] = []
    more = list(notes)
    for package in packages:
        devices += _devices(package, ids, pairs, (host_id, source), is_whole=is_whole)
    for i, device in enumerate(devices):
        devices[i], said = described(device)
        more += said
    domains = tuple(_hives(packages, ids, pairs, source, more))
    return built(
        "what the AMD driver says",
        hosts=(Host(host_id=host_id),),
        devices=tuple(devices),
        domains=domains,
        links=tuple(_links(pairs, source)),
        notes=tuple(more),
    )


def _ids(packages: Sequence[Package], host_id: str) -> _Ids:
    whole: dict[int, str] = {}
    own: dict[int, str] = {}
    for n, package in enumerate(packages):
        for i, node in enumerate(package.nodes):
            whole[node.number] = f"{host_id}/gpu{n}"
            own[node.number] = f"{host_id}/gpu{n}/part{i}" if package.is_partitioned else f"{host_id}/gpu{n}"
    return _Ids(whole, own, {number: i for i, number in enumerate(sorted(whole))})


def _devices(
    package: Package, ids: _Ids, pairs: Pairs, where: tuple[str, Source], *, is_whole: bool
) -> Iterator[Device]:
    host_id, source = where
    name = ids.whole[package.nodes[0].number]
    # Links to nodes that are closed to us may be several to one GPU.
    num_links, link_rate = _ports(name, pairs) if is_whole else (0, 0.0)
    facts: dict[str, Any] = {
        "host_id": host_id,
        "vendor": "amd",
        "name": package.name,
        "architecture": package.architecture,
        "pci": package.pci,
        "pci_id": package.pci_id,
        "numa_node": package.numa_node,
        "partition_mode": package.modes,
    }
    whole = {"uuid": package.uuid, "num_links": num_links, "link_nbytes_per_s": link_rate}
    if not package.is_partitioned:
        node = package.nodes[0]
        memory = package.memory_nbytes or node.memory_nbytes
        own = {"index": ids.order[node.number], "memory_nbytes": memory}
        yield Device.told(source, device_id=name, **own, **whole, **facts)
        return
    yield Device.told(source, device_id=name, memory_nbytes=package.memory_nbytes, **whole, **facts)
    for node in package.nodes:
        own = {"index": ids.order[node.number], "memory_nbytes": node.memory_nbytes}
        yield Device.told(source, device_id=ids.own[node.number], partition_of=name, **own, **facts)


Pairs = Mapping[tuple[str, str, str], Edge]


def _pairs(edges: Sequence[Edge], whole: Mapping[int, str]) -> Pairs:
    """The fastest link of each kind between each two GPUs; those inside one say no more than `partition_of` does."""
    pairs: dict[tuple[str, str, str], Edge] = {}
    for edge in edges:
        a, b = whole.get(edge.start), whole.get(edge.end)
        if a is None or b is None or a == b or not edge.kind:
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


def _links(pairs: Pairs, source: Source) -> Iterator[Link]:
    for (a, b, kind), edge in sorted(pairs.items()):
        yield Link.told(source, a=a, b=b, kind=kind, nbytes_per_s=float(edge.fastest * MB))


def _hives(packages: Sequence[Package], ids: _Ids, pairs: Pairs, source: Source, notes: list[str]) -> Iterator[Domain]:
    """What can be opened of the GPUs of one hive, as far as each has an xGMI link to another one of it."""
    hives: dict[int, list[Package]] = defaultdict(list)
    for package in packages:
        if package.hive_id:
            hives[package.hive_id].append(package)
    joined = {end for a, b, kind in pairs if kind == XGMI for end in (a, b)}
    for hive_id, inside in hives.items():
        for package in list(inside) if len(inside) > 1 else ():
            name = ids.whole[package.nodes[0].number]
            if name not in joined:
                inside.remove(package)
                notes.append(f"{name}: in hive {hive_id:016x}, but with no xGMI link to the others")
        domain: dict[str, Any] = {"domain_id": f"xgmi-{hive_id:016x}", "kind": DomainKind.XGMI}
        members = tuple(ids.own[node.number] for package in inside for node in package.nodes)
        if members:
            yield Domain.told(source, members=members, **domain).joined(_rate(inside, ids, pairs, source, domain))


def _rate(inside: Sequence[Package], ids: _Ids, pairs: Pairs, source: Source, domain: Mapping[str, Any]) -> Domain:
    """What the slowest GPU sends to the others together; unknown for partitions, which share their GPU's links."""
    if any(package.is_partitioned for package in inside):
        return Domain(**domain)
    sums = []
    for package in inside:
        mine = ids.whole[package.nodes[0].number]
        rates = [edge.fastest for (a, b, kind), edge in pairs.items() if kind == XGMI and mine in (a, b)]
        sums.append(sum(rates) if all(rates) else 0)
    if all(sums):
        return Domain.told(source, nbytes_per_s=float(min(sums) * MB), **domain)
    row = identify(pci_id=inside[0].pci_id)
    share = (len(inside) - 1) / (row.domain_size - 1) if row and row.domain_size > 1 else 0.0
    return Domain.told(Source.TABLE, nbytes_per_s=row.scale_up_nbytes_per_s * share if row else 0.0, **domain)
