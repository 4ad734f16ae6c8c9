"""What a set of holders shares when it moves bytes: limited resources, and which of them a hop uses. Pure.

Built from a topology once per view. A resource is one direction of something narrow: a host's NICs, a device's share of
them or its scale-up links, the uplink of a rack. A resource without a known rate is left out: nothing limits by guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from wsync.errors import PlanError
from wsync.paths import Medium, Path, PathFinder
from wsync.topology import DomainKind, Topology

OVERHEAD_S = {Medium.SCALE_UP: 20e-6, Medium.HOST: 50e-6, Medium.RDMA: 50e-6, Medium.IP: 300e-6}
"""Of one read, until a hop has been measured: what the conformance kit's peers needed, rounded up."""
_WIDEST_FIRST = (DomainKind.SITE, DomainKind.ZONE, DomainKind.BLOCK, DomainKind.RACK)


class Node(msgspec.Struct, frozen=True):
    """A holder as the planner sees it: its memory is a host's, or a device's if `device_id` is given."""

    node_id: str
    host_id: str
    device_id: str = ""


class Hop(msgspec.Struct, frozen=True):
    """One holder pulls from another: over which path, and what that takes a part of."""

    path: str
    medium: Medium
    resources: tuple[str, ...]
    overhead_s: float
    nbytes_per_s: float
    """Of the narrowest resource when nobody else uses it; 0 if none is known."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the user or a measurement says of paths. Names are those of `wsync.paths`; pairs are (source, receiver)."""

    allowed: frozenset[str] = frozenset()
    """Empty: all."""
    forbidden: frozenset[str] = frozenset()
    forced: Mapping[tuple[str, str], str] = {}
    measured: Mapping[tuple[str, str], float] = {}
    """bytes/s of a hop that delivered less than its resources promise."""


class Fabric:
    """Hops, capacities and the nesting of holders. Raises PlanError for a node that the topology does not have."""

    def __init__(self, topology: Topology, nodes: Iterable[Node], limits: Limits | None = None) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self.capacity: dict[str, float] = {}
        """Resource -> bytes/s."""
        self._limits = limits or Limits()
        self._finder = PathFinder(topology)
        self._devices = {device.device_id: device for device in topology.devices}
        self._slow = _blamed(self._limits.measured)
        self._slow_ends = _slow_ends(self._limits.measured)
        self._hops: dict[tuple[str, str], Hop | None] = {}
        self._networks = _networks_of(topology)
        self._uplinks = {d.domain_id: d.uplink_nbytes_per_s for d in topology.domains if d.uplink_nbytes_per_s}
        self._members: defaultdict[str, list[str]] = defaultdict(list)
        self._kinds: defaultdict[object, list[str]] = defaultdict(list)
        hosts = {host.host_id for host in topology.hosts}
        for node in self.nodes.values():
            device = self._devices.get(node.device_id)
            if node.host_id not in hosts or (node.device_id and (device is None or device.host_id != node.host_id)):
                raise PlanError(f"holder {node.node_id} is on '{node.device_id or node.host_id}', which is not there")
            for place in {self.island(node.node_id), node.host_id}:
                self._members[place].append(node.node_id)
            kind = (self._finder.nic_kinds(node.host_id), device.paths if device else None)
            self._kinds[kind].append(node.node_id)

    # --- nesting
    def networks(self, node_id: str) -> tuple[str, ...]:
        """The network domains that it is in, the widest first, then its host."""
        host_id = self.nodes[node_id].host_id
        return (*self._networks.get(host_id, ()), host_id)

    def island(self, node_id: str) -> str:
        """What it shares a faster way than the network with: its device's scale-up domain, else its host."""
        node = self.nodes[node_id]
        return self._finder.island(node.device_id) if node.device_id else node.host_id

    def likeness(self, node_id: str) -> object:
        """Equal for holders whose paths to any other holder are the same ones."""
        node = self.nodes[node_id]
        device = self._devices.get(node.device_id)
        is_special = any(node_id in pair for pair in (*self._limits.forced, *self._limits.measured))
        return (
            self._finder.nic_kinds(node.host_id),
            device.paths if device else None,
            node_id if is_special else "",
        )

    def observed(self, node_id: str) -> float:
        """bytes/s of the holder by what was measured, if that is the likely cause of a slow hop; else infinite."""
        return self._slow.get(node_id, float("inf"))

    # --- hops
    def hop(self, source: str, receiver: str) -> Hop | None:
        """The best path that both have and nobody forbids; None if there is none."""
        pair = (source, receiver)
        if pair not in self._hops:
            path = self._choose(pair)
            self._hops[pair] = self._hop(pair, path) if path else None
        return self._hops[pair]

    def is_known(self, source: str, receiver: str) -> bool:
        """Whether the rates of both ends of the hop are known; the memory of their host is taken to limit nothing."""
        hop = self.hop(source, receiver)
        if hop is None or hop.medium is Medium.HOST:
            return hop is not None
        return bool(self.own(source, hop.medium, "out")) and bool(self.own(receiver, hop.medium, "in"))

    def _choose(self, pair: tuple[str, str]) -> Path | None:
        limits, forced = self._limits, self._limits.forced.get(pair)
        for path in self._paths(*(self.nodes[name] for name in pair)):
            if forced is not None:
                if path.name == forced:
                    return path
            elif path.name not in limits.forbidden and (not limits.allowed or path.name in limits.allowed):
                return path
        return None

    def _paths(self, a: Node, b: Node) -> Sequence[Path]:
        if a.device_id and b.device_id and a.device_id != b.device_id:
            return self._finder.between(a.device_id, b.device_id)
        if a.host_id == b.host_id:
            return (Path("shm", Medium.HOST, 0.0, "the memory of their host"),)
        return self._finder.between(a.host_id, b.host_id)

    def _hop(self, pair: tuple[str, str], path: Path) -> Hop:
        found: list[str] = []

        def add(name: str, nbytes_per_s: float) -> None:
            if nbytes_per_s:
                self.capacity[name] = nbytes_per_s
                found.append(name)

        a, b = (self.nodes[name] for name in pair)
        self._use(a, path.medium, "out", add)
        self._use(b, path.medium, "in", add)
        if path.medium in (Medium.RDMA, Medium.IP):
            theirs, ours = set(self._networks.get(b.host_id, ())), set(self._networks.get(a.host_id, ()))
            for domain_id in ours - theirs:
                add(f"{domain_id}/uplink.out", self._uplinks.get(domain_id, 0.0))
            for domain_id in theirs - ours:
                add(f"{domain_id}/uplink.in", self._uplinks.get(domain_id, 0.0))
        add(f"{pair[0]}>{pair[1]}", self._limits.measured.get(pair, 0.0))
        if path.medium in (Medium.RDMA, Medium.IP):
            for node, way in zip(pair, ("out", "in"), strict=True):
                add(f"{node}/seen.{way}", self._slow_ends.get((node, way), 0.0))
        rate = min((self.capacity[name] for name in found), default=0.0)
        return Hop(path.name, path.medium, tuple(sorted(found)), OVERHEAD_S[path.medium], rate)

    def _use(self, node: Node, medium: Medium, way: str, add: Callable[[str, float], None]) -> None:
        device = self._devices.get(node.device_id)
        if medium is Medium.SCALE_UP:
            domain = self._finder.domain(node.device_id)
            if device is not None and domain is not None:
                add(f"{node.device_id}/scale_up.{way}", self._finder.scale_up_nbytes_per_s(device, domain))
        elif medium is Medium.RDMA and device is not None:
            add(f"{node.device_id}/rdma.{way}", self._finder.share_nbytes_per_s(device))
        elif medium is not Medium.HOST:
            add(f"{node.host_id}/{medium}.{way}", self._finder.network_nbytes_per_s(node.host_id, medium))

    # --- cuts
    def own(self, node_id: str, medium: Medium, way: str) -> dict[str, float]:
        """The holder's own resources that a hop through `medium` into (`in`) or out of it (`out`) uses; known ones."""
        found: dict[str, float] = {}
        self._use(self.nodes[node_id], medium, way, found.__setitem__)
        return {name: rate for name, rate in found.items() if rate}

    def peers(self, node_id: str, inside: set[str]) -> list[str]:
        """Holders outside of a group that stand for all of them, as far as the ways between them and this one go."""
        home = {self.island(node_id), self.nodes[node_id].host_id}
        near = [self._members[place] for place in home]
        found = [next((other for other in members if other not in inside), "") for members in near]
        for members in self._kinds.values():
            far = (m for m in members if m not in inside and not home & {self.island(m), self.nodes[m].host_id})
            found.append(next(far, ""))
        for pair in self._limits.forced:
            found += [other for other in pair if node_id in pair and other not in inside]
        return [other for other in dict.fromkeys(found) if other]

    def uplink(self, domain_id: str) -> float:
        """Of the network domain, per direction; 0 if unknown."""
        return self._uplinks.get(domain_id, 0.0)


def _networks_of(topology: Topology) -> dict[str, tuple[str, ...]]:
    """Host -> the network domains around it, the widest first."""
    above: defaultdict[str, list[str]] = defaultdict(list)
    order: dict[str, tuple[int, int]] = {}
    for domain in topology.domains:
        if not domain.is_scale_up:
            order[domain.domain_id] = (_WIDEST_FIRST.index(domain.kind), -len(domain.members))
            for member in domain.members:
                above[member].append(domain.domain_id)

    def around(name: str, seen: frozenset[str]) -> set[str]:
        found: set[str] = set()
        for domain_id in above[name]:
            if domain_id not in seen:
                found |= {domain_id} | around(domain_id, seen | {domain_id})
        return found

    hosts = [host.host_id for host in topology.hosts]
    return {host: tuple(sorted(around(host, frozenset()), key=lambda d: (order[d], d))) for host in hosts}


def _slow_ends(measured: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """(holder, `in` or `out`) -> bytes/s, where several hops of one holder were slow: so will be all of them."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for (source, receiver), rate in measured.items():
        found[source, "out"].append(rate)
        found[receiver, "in"].append(rate)
    return {end: max(rates) for end, rates in found.items() if len(rates) > 1}


def _blamed(measured: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """As few holders as explain all slow hops: those that are in most of them, of equals the one that receives."""
    left, found = dict(measured), dict[str, float]()
    while left:
        ends = [node for pair in left for node in pair]
        receiving = {receiver for _, receiver in left}
        worst = max(sorted(set(ends)), key=lambda node: (ends.count(node), node in receiving))
        found[worst] = max(rate for pair, rate in left.items() if worst in pair)
        left = {pair: rate for pair, rate in left.items() if worst not in pair}
    return found
