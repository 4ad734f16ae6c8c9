"""Routes for the channels of a job, by what the present view can carry, what moves already, and what was slow. Pure.

A route is made once for a version's holders and replayed for the next ones, until somebody comes or goes or a hop turns
out slow.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

from wsync.engine.fabric import Fabric, Hop, Limits, Node
from wsync.engine.membership import View
from wsync.engine.route_cost import Load, load_of, plus
from wsync.engine.route_trees import Tree
from wsync.engine.routes import Lane, RoutedLane, Routing, route, way_of
from wsync.errors import ConfigError, PlanError
from wsync.paths import Medium
from wsync.topology import Host, Topology

logger = logging.getLogger("wsync")

MAX_ROOTS = 8
REMEMBERED_S, MAX_REMEMBERED_S = 60.0, 3600.0
"""A slow hop is avoided for so long, then tried again; twice as long each time that it is found slow again."""
SLOWEST_NBYTES_PER_S = 1e3


@dataclass
class _SlowHop:
    nbytes_per_s: float
    until: float
    num_times: int = 1


@dataclass
class _Moving:
    """What a channel sends, or sent last; `beside` are those who came later, as long as they are on their way."""

    routed: RoutedLane
    load: Load
    beside: list[tuple[RoutedLane, Load]] = field(default_factory=list)

    @property
    def total(self) -> Load:
        return reduce(plus, (load for _, load in self.beside), self.load)


class Planner:
    """One per job. `see` the present view before anything else is asked."""

    def __init__(self) -> None:
        self.epoch = 0
        """Grows when a hop turns out slow: routes in use are made anew then."""
        self._view = View()
        self._now = 0.0
        self._fabric: Fabric | None = None
        self._slow: dict[tuple[str, str], _SlowHop] = {}
        self._fastest: dict[Medium, float] = {}
        self._moving: dict[str, _Moving] = {}
        self._in_flight: set[str] = set()
        self._totals: dict[str, Load] = {}
        self._now_flying: tuple[Load, dict[tuple[str, str], float], Counter[str]] | None = None
        self._made: dict[str, tuple[object, Routing]] = {}
        self._ways: dict[object, tuple[Tree, ...]] = {}
        self._near: dict[tuple[str, ...], frozenset[str]] = {}

    # --- what there is
    def see(self, view: View, now: float) -> None:
        """From now on plan for this view. Slow hops whose time is over are tried again."""
        self._now = now
        is_stale = view.number != self._view.number or any(0.0 < hop.until <= now for hop in self._slow.values())
        self._view = view
        if is_stale:
            for hop in self._slow.values():
                hop.until = hop.until if hop.until > now else 0.0
            self._start_anew()

    def _start_anew(self) -> None:
        self._now_flying = None
        self._fabric = None
        self._made.clear()
        self._ways.clear()
        self._near.clear()

    @property
    def fabric(self) -> Fabric:
        """The hosts of the view with all that they know of themselves."""
        if self._fabric is None:
            self._fabric = self._build()
        return self._fabric

    def _build(self) -> Fabric:
        holders = self._view.holders
        bare = Topology(hosts=tuple(Host(host_id=name) for name in dict.fromkeys(h.host for h in holders)))
        try:
            topology = bare.joined(*(h.topology for h in holders if h.topology is not None))
        except ConfigError as exc:
            logger.warning("what the hosts say of themselves cannot be joined, routes are made without it: %s", exc)
            topology = bare
        names = [set(holder.endpoints) for holder in holders]
        allowed = frozenset(set.intersection(*names) or set.union(*names)) if names else frozenset()
        here = {holder.holder_id for holder in holders}
        measured = {
            pair: hop.nbytes_per_s
            for pair, hop in self._slow.items()
            if hop.until > self._now and here.issuperset(pair)
        }
        nodes = [Node(holder.holder_id, holder.host) for holder in holders]
        return Fabric(topology, nodes, Limits(allowed=allowed, measured=measured))

    # --- routes
    def route(
        self,
        channel: str,
        nbytes: int,
        roots: Sequence[str],
        receivers: Sequence[str],
        *,
        is_beside: bool = False,
    ) -> Routing:
        """How these receivers get a version of `nbytes` from the best of `roots`, which have it or are ahead.

        `is_beside`: while what was routed before for the channel goes on; else in its place. Where nothing tells roots
        apart the first is taken. The chunks are those that the next versions should have.
        """
        is_flying = channel in self._in_flight
        self._in_flight.add(channel)
        self._now_flying = None
        key = (tuple(roots), tuple(receivers), nbytes)
        known = self._made.get(channel)
        if known is not None and known[0] == key and not is_beside:
            return known[1]
        before = self._moving.get(channel) if is_beside else None
        total = self._totals.get(_group(channel), {})
        others = total if before is not None and is_flying else self._others(channel)
        tried = [self._from(channel, nbytes, root, receivers, others) for root in self._distinct(roots)]
        best, load = min(tried, key=lambda found: found[0].predicted_s)
        if before is not None:
            before.beside.append((best.lanes[0], load))
            self._totals[_group(channel)] = plus(total, load)
        else:
            self._totals[_group(channel)] = plus(others, load)
            self._moving[channel] = _Moving(best.lanes[0], load)
            self._made[channel] = (key, best)
        return best

    def _from(
        self, channel: str, nbytes: int, root: str, receivers: Sequence[str], others: Load
    ) -> tuple[Routing, Load]:
        lane = Lane(channel, nbytes, root, tuple(receivers))
        try:
            # The lanes of a sharded channel are many and mostly alike: one of a kind is compared, the rest goes along.
            way = (_group(channel), nbytes.bit_length(), way_of(self.fabric, lane, self._near))
            trees = self._ways.get(way, ()) if "#" in channel else ()
            routing = route(self.fabric, [lane], background=others, trees=trees)
            self._ways[way] = routing.lanes[0].trees
            return routing, load_of(self.fabric, [lane], routing.lanes[0].trees)
        except PlanError as exc:
            # Every receiver gets its order all the same: those that cannot be reached say so, by name.
            logger.warning("channel '%s': %s", channel, exc)
            bare = Topology(hosts=tuple(Host(host_id=h) for h in {record.host for record in self._view.holders}))
            fabric = Fabric(bare, [Node(record.holder_id, record.host) for record in self._view.holders])
            return route(fabric, [lane]), {}

    def _distinct(self, roots: Sequence[str]) -> list[str]:
        """One root of each place: others there would do as well."""
        found: dict[object, str] = {}
        for root in roots:
            place = (self.fabric.island(root), *self.fabric.networks(root), self.fabric.likeness(root))
            found.setdefault(place, root)
        return list(found.values())[:MAX_ROOTS]

    def _others(self, channel: str) -> Load:
        """What the other lanes of a sharded channel load, in flight or not: they are published together."""
        mine = self._moving.get(channel)
        total = self._totals.get(_group(channel), {})
        return plus(total, mine.total, -1) if mine is not None else total

    def landed(self, channel: str) -> None:
        """Nothing of the channel is on its way any more."""
        if channel in self._in_flight:
            self._in_flight.discard(channel)
            self._now_flying = None
        moving = self._moving.get(channel)
        if moving is not None and moving.beside:
            self._totals[_group(channel)] = plus(self._others(channel), moving.load)
            moving.beside.clear()

    def forget(self, channel: str) -> None:
        """There is no such channel any more."""
        self._totals[_group(channel)] = self._others(channel)
        self._moving.pop(channel, None)
        self._made.pop(channel, None)
        self._in_flight.discard(channel)
        self._now_flying = None

    # --- what turns out
    def seen(self, source: str, receiver: str, nbytes_per_s: float) -> None:
        """So much came over that hop: what its kind can do at least."""
        hop = self._hop(source, receiver)
        if hop is not None:
            self._fastest[hop.medium] = max(nbytes_per_s, self._fastest.get(hop.medium, 0.0))

    def expected(self, source: str, receiver: str) -> float:
        """bytes/s of all that is routed over a hop while all that is in flight moves; 0 if unknown.

        By the bytes of each hop, or by even shares of what hops have in common if that is less; and not more than any
        hop of the medium has shown yet: processors limit, too.
        """
        hop = self._hop(source, receiver)
        if hop is None or not hop.resources or not self.fabric.is_known(source, receiver):
            return 0.0
        loads, pairs, num_hops = self._flying()
        nbytes = pairs.get((source, receiver), 0.0)
        if not nbytes:
            return 0.0
        shares = (min(nbytes / max(nbytes, loads.get(r, 0.0)), 1 / max(1, num_hops[r])) for r in hop.resources)
        limits = (share * self.fabric.capacity[r] for share, r in zip(shares, hop.resources, strict=True))
        return min(*limits, self._fastest.get(hop.medium, 0.0))

    def _flying(self) -> tuple[Load, dict[tuple[str, str], float], Counter[str]]:
        """What is in flight: bytes through each resource and over each hop, and hops that share each resource.

        Counted once for each change.
        """
        if self._now_flying is None:
            loads: Load = {}
            pairs: dict[tuple[str, str], float] = {}
            for channel in self._in_flight & self._moving.keys():
                moving = self._moving[channel]
                loads = plus(loads, moving.total)
                for routed in (moving.routed, *(routed for routed, _ in moving.beside)):
                    for pair, part in routed.hops().items():
                        pairs[pair] = pairs.get(pair, 0.0) + part * routed.lane.nbytes
            hops = filter(None, (self._hop(*pair) for pair in pairs))
            self._now_flying = loads, pairs, Counter(resource for hop in hops for resource in hop.resources)
        return self._now_flying

    def _hop(self, source: str, receiver: str) -> Hop | None:
        """None also where one of them has gone."""
        return self.fabric.hop(source, receiver) if {source, receiver} <= self.fabric.nodes.keys() else None

    def slow(self, source: str, receiver: str, nbytes_per_s: float) -> None:
        """Routes avoid that hop, or count on no more than this, for a while. Begins a new epoch."""
        former = self._slow.get((source, receiver))
        num_times = 1 if former is None else former.num_times + (not former.until)
        until = self._now + min(MAX_REMEMBERED_S, REMEMBERED_S * 2 ** (num_times - 1))
        self._slow[source, receiver] = _SlowHop(max(SLOWEST_NBYTES_PER_S, nbytes_per_s), until, num_times)
        self.epoch += 1
        self._start_anew()


def _group(channel: str) -> str:
    return channel.partition("#")[0]


def recovery_order(ready: dict[str, bytes], num_chunks: int) -> tuple[list[str], bool]:
    """After the origin is lost: receivers by how much they have, most first, and whether together they have it all.

    `ready` maps each living receiver to its ready bytes (empty: nothing).
    """
    order = sorted(ready, key=lambda holder: (-ready[holder].count(1), holder))
    covered = bytearray(num_chunks)
    for flags in ready.values():
        for chunk, flag in enumerate(flags[:num_chunks]):
            covered[chunk] |= flag
    return order, all(covered)
