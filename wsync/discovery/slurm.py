"""Slurm's picture of the network: `topology.yaml`, `topology.conf` of the plugins tree and block, a job's variables.

Reading YAML takes PyYAML, which Ray brings along; without it `scontrol show topology`, whose lines are those of
`topology.conf`, says the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path

import msgspec

from wsync.discovery.reading import Tier, built, domains_of, network_tiers
from wsync.errors import ProbeError
from wsync.topology import Host, Source, Topology

MOST_NODES = 1 << 16
"""More than a cluster of Slurm has: a list that stands for more is a mistake."""

_KEYS = {
    "SwitchName": ("Nodes", "Switches", "LinkSpeed", "Level"),
    "BlockName": ("Nodes", "BlockIndex"),
    "BlockSizes": (),
}


class _Group(msgspec.Struct, frozen=True):
    """A switch or block: its nodes, and the switches below it."""

    kind: str
    name: str
    nodes: tuple[str, ...]
    switches: tuple[str, ...]


class _Switch(msgspec.Struct):
    switch: str
    nodes: str = ""
    children: str = ""


class _Block(msgspec.Struct):
    block: str
    nodes: str = ""


class _Tree(msgspec.Struct):
    switches: list[_Switch] = []


class _Blocks(msgspec.Struct):
    blocks: list[_Block] = []


class _Listed(msgspec.Struct):
    """One topology of `topology.yaml`."""

    topology: str = ""
    cluster_default: bool = False
    tree: _Tree = msgspec.field(default_factory=_Tree)
    block: _Blocks = msgspec.field(default_factory=_Blocks)

    def groups(self) -> Iterator[_Group]:
        for one in self.tree.switches:
            lists = [tuple(hostlist(text)) if text else () for text in (one.nodes, one.children)]
            yield _Group("SwitchName", one.switch, *lists)
        for each in self.block.blocks:
            yield _Group("BlockName", each.block, tuple(hostlist(each.nodes)) if each.nodes else (), ())


def probe(host_id: str) -> Topology:
    """What `topology.yaml` or `topology.conf` says of all hosts, else what this job's environment says of this one.

    Hosts of the file have Slurm's names of nodes; this machine is `host_id`.
    """
    folder = Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    node = os.environ.get("SLURMD_NODENAME", "")
    for name, read in (("topology.yaml", read_topology_yaml), ("topology.conf", read_topology_conf)):
        path = folder / name
        if path.exists():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                raise ProbeError(f"{path} cannot be read: {exc}", hint="make it readable, or declare it") from exc
            return read(text, host_ids={node: host_id} if node else None)
    where, pattern = (os.environ.get(f"SLURM_TOPOLOGY_ADDR{end}", "") for end in ("", "_PATTERN"))
    return read_topology_addr(where, pattern, host_id=host_id) if where else Topology()


def read_topology_conf(text: str, *, host_ids: Mapping[str, str] | None = None) -> Topology:
    """Racks and blocks of `topology.conf` or `scontrol show topology`. `host_ids` are by node name; others keep that.

    In a tree the switches that have nodes are racks, those above them blocks; in the block plugin a block is a block.
    Raises ProbeError on lines that are none of these, on switches below themselves, and on lists of impossible size.
    """
    return _placed("topology.conf", [group for line in _lines(text) for group in _group(line)], host_ids)


def read_topology_yaml(text: str, *, host_ids: Mapping[str, str] | None = None) -> Topology:
    """The same of `topology.yaml`: of the topology that is the cluster's default, else of the first; others are noted.

    Raises ProbeError where PyYAML is missing, too.
    """
    try:
        import yaml
    except ImportError as exc:
        raise ProbeError(
            "topology.yaml takes PyYAML to read", hint="install pyyaml, or give `scontrol show topology` instead"
        ) from exc
    try:
        listed = msgspec.convert(yaml.safe_load(text), list[_Listed])
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as exc:
        raise ProbeError(f"topology.yaml cannot be read: {exc}", hint="a list of topologies is expected") from exc
    chosen = next((one for one in listed if one.cluster_default), listed[0] if listed else _Listed())
    found = _placed("topology.yaml", list(chosen.groups()), host_ids)
    others = [
        f"topology '{one.topology}' of topology.yaml is not the default: not read"
        for one in listed
        if one is not chosen
    ]
    return msgspec.structs.replace(found, notes=(*found.notes, *others))


def _placed(what: str, groups: Sequence[_Group], host_ids: Mapping[str, str] | None) -> Topology:
    above = _above(groups, what)
    chains: list[tuple[str, list[Tier]]] = []
    notes: list[str] = []
    for group in groups:
        if group.switches:  # its nodes, if they are listed, are those of the switches
            continue
        path = _path(group.name, above, notes, what) if group.kind == "SwitchName" else [group.name]
        tiers = network_tiers(path, has_rack=group.kind == "BlockName")
        chains += [((host_ids or {}).get(node, node), tiers) for node in group.nodes]
    hosts = tuple(Host(host_id=host_id) for host_id in dict.fromkeys(host_id for host_id, _ in chains))
    domains = domains_of(chains, Source.PLATFORM)
    return built(what, hosts=hosts, domains=domains, notes=tuple(dict.fromkeys(notes)))


def read_topology_addr(where: str, pattern: str, *, host_id: str) -> Topology:
    """This host's switches from the two variables that Slurm sets in a job: `s0.s4.node7` and `switch.switch.node`."""
    names, kinds = where.split("."), pattern.split(".")
    if len(names) != len(kinds) or not all(names) or kinds[-1] != "node" or set(kinds[:-1]) - {"switch", "block"}:
        raise ProbeError(
            f"SLURM_TOPOLOGY_ADDR is '{where:.60}', its pattern '{pattern:.60}'",
            hint="switch.switch.node or the like is expected; names with dots cannot be read, declare the topology",
        )
    tiers = network_tiers(names[-2::-1], has_rack="block" in kinds)
    return built(
        "SLURM_TOPOLOGY_ADDR", hosts=(Host(host_id=host_id),), domains=domains_of([(host_id, tiers)], Source.PLATFORM)
    )


def hostlist(text: str) -> list[str]:
    """The names that an expression of Slurm stands for: `a[1-2],b[01,05]x` is a1, a2, b01x, b05x. Raises ProbeError."""
    found: list[str] = []
    for part in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if any(set(piece) & set("[]") for piece in pieces) or not part:
            raise ProbeError(f"'{text:.60}' is no list of hosts", hint="node[01-16,20] or the like is expected")
        choices = [_numbers(piece, text) if number % 2 else [piece] for number, piece in enumerate(pieces)]
        total = prod(len(choice) for choice in choices)
        if len(found) + total > MOST_NODES:
            raise ProbeError(f"'{text:.60}' stands for more than {MOST_NODES} hosts", hint="correct the list")
        found += ["".join(names) for names in product(*choices)]
    return found


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket."""
    return re.split(r",(?![^\[]*\])", text)


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if ends is None or (ends[2] and int(ends[2]) < int(ends[1])):
            raise ProbeError(f"'{whole:.60}' has the range '{part:.40}'", hint="01-16 or the like is expected")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last - first >= MOST_NODES - len(found):
            raise ProbeError(f"'{whole:.60}' stands for more than {MOST_NODES} hosts", hint="correct the list")
        found += [f"{number:0{len(ends[1])}}" for number in range(first, last + 1)]
    return found


def _lines(text: str) -> Iterator[str]:
    joined = re.sub(r"\\\n", " ", text)
    return (line for raw in joined.splitlines() if (line := raw.split("#")[0].strip()))


def _group(line: str) -> Iterator[_Group]:
    """The switch or block of a line; none for lines that only say which sizes of blocks there are."""
    pairs = [word.partition("=") for word in line.split()]
    first = next((key for key in _KEYS if key.lower() == pairs[0][0].lower()), "")
    spelled = {key.lower(): key for key in _KEYS.get(first, ())}
    values = {spelled.get(key.lower(), ""): value for key, _, value in pairs[1:]}
    name = pairs[0][2]
    if not first or not name or "" in values or len(values) != len(pairs) - 1 or not all(values.values()):
        raise ProbeError(f"topology.conf has the line '{line:.60}'", hint=f"{', '.join(_KEYS)} are read")
    if first != "BlockSizes":
        lists = {key: tuple(hostlist(values[key])) if key in values else () for key in ("Nodes", "Switches")}
        yield _Group(first, name, lists["Nodes"], lists["Switches"])


def _above(groups: Sequence[_Group], what: str) -> dict[str, list[str]]:
    """The switches right above each switch."""
    names = {group.name for group in groups if group.kind == "SwitchName"}
    above: dict[str, list[str]] = {}
    for group in groups:
        for below in group.switches:
            if below not in names:
                raise ProbeError(
                    f"{what}: switch '{group.name}' is above '{below}', which is missing", hint="give all of it"
                )
            above.setdefault(below, []).append(group.name)
    return above


def _path(switch: str, above: Mapping[str, Sequence[str]], notes: list[str], what: str) -> list[str]:
    """The switch and those above it, as far as there is one way up."""
    path = [switch]
    while len(parents := above.get(path[-1], ())) == 1:
        if parents[0] in path:
            raise ProbeError(f"switch '{switch}' of {what} is below itself", hint="give a tree")
        path.append(parents[0])
    if parents:
        notes.append(f"several switches are above '{path[-1]}': what is beyond is not read")
    return path
