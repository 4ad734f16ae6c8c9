"""Trees by which a lane can reach its receivers: candidates that the planner compares by predicted time. Pure.

Receivers that share a faster way than the network are one unit, entered at one member per stripe. Units are ordered so
that every network domain is visited once and faster ones come first, because a slow one slows all that are behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec

from wsync.engine.fabric import Fabric
from wsync.errors import PlanError
from wsync.paths import Medium

ORIGIN = -1
NUM_CHAINS = (1, 2, 4, 8, 16, 32)
MAX_STRIPES = 64
MAX_STAR = 64
"""With more receivers than that nobody serves all of them himself."""


class Tree(msgspec.Struct, frozen=True, dict=True):
    """Who pulls from whom in one stripe. A parent is the place of an earlier receiver, or `ORIGIN`; so it is a tree."""

    receivers: tuple[str, ...]
    parents: tuple[int, ...]
    paths: tuple[str, ...]
    """Of each receiver's hop."""

    def __post_init__(self) -> None:
        if not len(self.receivers) == len(self.parents) == len(self.paths):
            raise PlanError(f"{len(self.receivers)} receivers, {len(self.parents)} parents, {len(self.paths)} paths")
        if len(set(self.receivers)) != len(self.receivers):
            raise PlanError(f"a receiver is in a tree twice: {self.receivers}")
        for place, parent in enumerate(self.parents):
            if not ORIGIN <= parent < place:
                raise PlanError(f"{self.receivers[place]} pulls from place {parent}, which nothing has reached yet")

    @cached_property
    def members(self) -> frozenset[str]:
        return frozenset(self.receivers)

    @cached_property
    def depth(self) -> int:
        """Hops to the furthest receiver."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ORIGIN else depths[parent] + 1)
        return max(depths, default=0)


class _Growing:
    """A tree while it is made. `add` is False when the two have no path."""

    def __init__(self, fabric: Fabric, origin: str) -> None:
        self._fabric, self._origin = fabric, origin
        self._receivers: list[str] = []
        self._parents: list[int] = []
        self._paths: list[str] = []
        self._place = {origin: ORIGIN}

    def add(self, receiver: str, parent: str) -> bool:
        hop = self._fabric.hop(parent, receiver)
        if hop is None:
            return False
        self._place[receiver] = len(self._receivers)
        self._receivers.append(receiver)
        self._parents.append(self._place[parent])
        self._paths.append(hop.path)
        return True

    def tree(self) -> Tree:
        return Tree(tuple(self._receivers), tuple(self._parents), tuple(self._paths))


Unit = tuple[str, ...]
Parents = tuple[int, ...]
"""Of each unit: the place of an earlier unit, or `ORIGIN`."""


def candidates(fabric: Fabric, origin: str, receivers: Sequence[str]) -> Iterator[tuple[Tree, ...]]:
    """Sets of trees, one tree per stripe, that all reach every receiver."""
    seen: set[tuple[object, ...]] = set()
    for units in _orders(fabric, origin, receivers):
        widest = max((len(unit) + _is_home(fabric, origin, unit) for unit in units), default=1)
        for parents in _shapes(fabric, units):
            for num_stripes in sorted({1, min(widest, MAX_STRIPES)}):
                for is_star in (True, False) if widest > 1 else (True,):
                    key = (units, parents, num_stripes, is_star)
                    if key not in seen:
                        seen.add(key)
                        trees = [_grown(fabric, origin, units, parents, s, is_star) for s in range(num_stripes)]
                        if None not in trees:
                            yield tuple(tree for tree in trees if tree is not None)


def spanning_tree(fabric: Fabric, origin: str, receivers: Sequence[str]) -> Tree:
    """Any tree over the paths there are; for fabrics where forced or forbidden paths leave no candidate.

    Raises PlanError naming the receivers that no path reaches.
    """
    growing, reached, missing = _Growing(fabric, origin), [origin], list(receivers)
    for source in reached:
        for receiver in list(missing):
            if growing.add(receiver, source):
                missing.remove(receiver)
                reached.append(receiver)
    if missing:
        raise PlanError(
            f"no path reaches {', '.join(missing)} from {origin} or from any other receiver",
            hint="allow a transport that both ends have",
        )
    return growing.tree()


def _grown(
    fabric: Fabric, origin: str, units: Sequence[Unit], parents: Parents, stripe: int, is_star: bool
) -> Tree | None:
    """One stripe's tree: from unit to unit at their gates of that stripe, and inside of each from its gate on.

    The gate of the origin's own unit is only where the stripe leaves it: the origin itself, or one that it has served.
    """
    growing, gates = _Growing(fabric, origin), list[str]()
    for unit, parent in zip(units, parents, strict=True):
        is_home = _is_home(fabric, origin, unit)
        members = (origin, *unit) if is_home else unit
        first = stripe % len(members)
        gates.append(members[first])
        inside = members if is_home else (*unit[first:], *unit[:first])
        if not is_home and not growing.add(inside[0], origin if parent == ORIGIN else gates[parent]):
            return None
        for source, receiver in pairwise(inside):
            if not growing.add(receiver, inside[0] if is_star else source):
                return None
    return growing.tree()


def _is_home(fabric: Fabric, origin: str, unit: Unit) -> bool:
    return fabric.island(origin) == fabric.island(unit[0])


def _orders(fabric: Fabric, origin: str, receivers: Sequence[str]) -> Iterator[tuple[Unit, ...]]:
    """Units in the orders that are worth trying: domain by domain, and by falling rate alone."""
    by_island: defaultdict[str, list[str]] = defaultdict(list)
    for receiver in receivers:
        by_island[fabric.island(receiver)].append(receiver)
    rates = {receiver: _forwarding_rate(fabric, origin, receiver) for receiver in receivers}
    units = [tuple(sorted(unit, key=lambda r: -rates[r])) for unit in by_island.values()]
    home = (*fabric.networks(origin), fabric.island(origin))
    nested = _visit(fabric, units, rates, home, 0)
    yield tuple(nested)
    by_rate = sorted(nested, key=lambda unit: -rates[unit[0]])
    yield tuple(by_rate)


def _visit(
    fabric: Fabric, units: Iterable[Unit], rates: dict[str, float], home: Sequence[str], level: int
) -> list[Unit]:
    """Units of one domain after those of another: the origin's own first, then by falling rate; so inside of each."""
    groups: defaultdict[str, list[Unit]] = defaultdict(list)
    for unit in units:
        place = (*fabric.networks(unit[0]), fabric.island(unit[0]))
        groups[place[level] if level < len(place) else ""].append(unit)
    if list(groups) == [""]:
        return sorted(groups[""], key=lambda unit: -rates[unit[0]])
    fastest = {
        name: min(fabric.uplink(name) or float("inf"), max(rates[unit[0]] for unit in inside))
        for name, inside in groups.items()
    }
    order = sorted(groups, key=lambda name: (name not in home, -fastest[name]))
    return [unit for name in order for unit in _visit(fabric, groups[name], rates, home, level + 1)]


def _forwarding_rate(fabric: Fabric, origin: str, receiver: str) -> float:
    """bytes/s at which it can serve others over the network by which the origin reaches it.

    Where nothing is known it counts as 0, and one that was seen to be slow as such: where it is last it harms nobody.
    """
    hop = fabric.hop(origin, receiver)
    if hop is not None and hop.medium is Medium.HOST:
        return float("inf")
    promised = sum(fabric.own(receiver, hop.medium, "out").values() if hop else ())
    return min(promised, fabric.observed(receiver))


def _shapes(fabric: Fabric, units: Sequence[Unit]) -> Iterator[Parents]:
    """Chains (cut where domains end, as far as that is near), a star, a tree of contiguous halves, and by domain."""
    num = len(units)
    for num_chains in NUM_CHAINS:
        if num_chains <= max(1, num // 2):
            slack = num // (4 * num_chains)
            starts = {_cut(fabric, units, place * num // num_chains, slack) for place in range(num_chains)}
            yield tuple(ORIGIN if place in starts else place - 1 for place in range(num))
    if num <= MAX_STAR:
        yield (ORIGIN,) * num
    yield _halves(num)
    places = [fabric.networks(unit[0])[:-1] for unit in units]
    entries = [place for place in range(num) if not place or places[place] != places[place - 1]]
    if len(entries) > 1:
        before = dict(pairwise(reversed(entries)))
        yield tuple(ORIGIN if place in entries else place - 1 for place in range(num))
        yield tuple(before.get(place, ORIGIN) if place in entries else place - 1 for place in range(num))


def _cut(fabric: Fabric, units: Sequence[Unit], near: int, slack: int) -> int:
    """The place within `slack` of `near` where the fewest domains go on from one unit to the next."""

    def shared(place: int) -> int:
        a, b = (fabric.networks(units[p][0]) for p in (place - 1, place))
        return sum(x == y for x, y in zip(a, b, strict=False))

    places = range(max(1, near - slack), min(len(units) - 1, near + slack) + 1)
    return min(places, key=lambda place: (shared(place), abs(place - near)), default=near) if near else 0


def _halves(num: int) -> Parents:
    """The first of a range serves the first of each half of the rest."""
    parents = [ORIGIN] * num
    ranges = [(0, num, ORIGIN)]
    for start, end, parent in ranges:
        if start < end:
            parents[start] = parent
            middle = (start + 1 + end) // 2
            ranges += [(start + 1, middle, start), (middle, end, start)]
    return tuple(parents)
