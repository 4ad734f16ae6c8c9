"""Routes of lanes: records that prove themselves, and the choice among candidate trees by predicted time. Pure.

A lane is cut into stripes by chunk (`chunk % num_stripes`), and each stripe has a tree of its own from the origin to
all receivers. One stripe is the common case; where holders share a faster way than the network (an NVLink domain),
stripes enter it at different members, so that every NIC of the domain takes its part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from wsync.config import DEFAULT_CHUNK_NBYTES
from wsync.engine.fabric import Fabric
from wsync.engine.route_cost import Bound, Load, bound_of, load_of, plus, times_of
from wsync.engine.route_trees import ORIGIN, Tree, candidates, spanning_tree
from wsync.errors import PlanError

NUM_PASSES = 2
SAME = 1.02
"""Candidates whose last receiver is ready within this factor of the best are compared by the mean of all receivers."""
CHUNK_COST_S = 200e-6
"""What a chunk costs its holder beside its bytes: it balances the pipeline's depth, which wants small chunks."""
NUM_UNDER_WAY = 4
"""Chunks that a hop has on its connections: one that is sent and one that is asked for, on each of two."""
MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES = 1 << 18, DEFAULT_CHUNK_NBYTES
_GRAIN = 1 << 16


class Lane(msgspec.Struct, frozen=True):
    """Bytes that one holder has and others want."""

    key: str
    nbytes: int
    origin: str
    receivers: tuple[str, ...]


class RoutedLane(msgspec.Struct, frozen=True):
    """A lane with its trees. Checked when built: every receiver is in every tree, exactly once, below the origin.

    (That a tree is one, and has no cycle, it checks itself.)
    """

    lane: Lane
    trees: tuple[Tree, ...]

    def __post_init__(self) -> None:
        if not self.trees:
            raise PlanError(f"lane {self.lane.key} has no route")
        wanted = set(self.lane.receivers)
        if len(wanted) != len(self.lane.receivers) or self.lane.origin in wanted:
            raise PlanError(
                f"lane {self.lane.key} goes to a holder twice: {self.lane.receivers} from {self.lane.origin}"
            )
        for tree in self.trees:
            if tree.members != wanted:
                odd = sorted(tree.members ^ wanted)
                raise PlanError(f"lane {self.lane.key}: {odd} not exactly once in the tree of each stripe")

    def parent(self, stripe: int, place: int) -> str:
        """From whom the receiver at that place of the stripe's tree pulls."""
        tree = self.trees[stripe]
        parent = tree.parents[place]
        return self.lane.origin if parent == ORIGIN else tree.receivers[parent]

    def sources(self, limit: int) -> dict[str, tuple[tuple[str, ...], ...]]:
        """Receiver -> of each stripe, whom it can pull from: its parent, then up to `limit` who never wait for it.

        These are the origin, those above the parent, and receivers that come before it, the nearest first.
        """
        found: dict[str, list[tuple[str, ...]]] = {receiver: [] for receiver in self.lane.receivers}
        for stripe, tree in enumerate(self.trees):
            for place, receiver in enumerate(tree.receivers):
                parent, above = self.parent(stripe, place), list[str]()
                at = tree.parents[place]
                while at != ORIGIN and len(above) < limit:
                    above.append(self.parent(stripe, at))
                    at = tree.parents[at]
                before = tree.receivers[max(0, place - limit) : place][::-1]
                found[receiver].append(tuple(dict.fromkeys((parent, self.lane.origin, *above, *before)))[: limit + 1])
        return {receiver: tuple(stripes) for receiver, stripes in found.items()}

    def hops(self) -> dict[tuple[str, str], float]:
        """(source, receiver) -> the part of the lane's bytes that takes this hop."""
        found: dict[tuple[str, str], float] = {}
        for stripe, tree in enumerate(self.trees):
            for place, receiver in enumerate(tree.receivers):
                pair = (self.parent(stripe, place), receiver)
                found[pair] = found.get(pair, 0.0) + 1 / len(self.trees)
        return found


class Routing(msgspec.Struct, frozen=True):
    """Routes of all lanes of a version, with what they promise. There are no times if a hop's rate is unknown."""

    lanes: tuple[RoutedLane, ...]
    chunk_nbytes: int
    predicted_s: float
    """From the first byte until the last receiver has everything; 0 if unknown."""
    receiver_s: dict[str, float]
    bound: Bound

    @property
    def ratio(self) -> float:
        """Predicted time over the bound; 0 if either is unknown."""
        return self.predicted_s / self.bound.time_s if self.bound.time_s else 0.0

    def promise(self) -> list[str]:
        """Predicted time, bound and ratio in words."""
        known = [
            f"{name} {time_s:.4g} s"
            for name, time_s in (("predicted", self.predicted_s), ("bound", self.bound.time_s))
            if time_s
        ]
        if not self.predicted_s:
            known.append("how long it takes is unknown: some link on the way has no known rate")
        elif self.ratio:
            known.append(f"ratio {self.ratio:.3f}")
        return [", ".join(known), *([f"bound: {self.bound.formula}"] if self.bound.formula else [])]

    def explain(self) -> str:
        """Lanes and trees, the predicted time, the bound and their ratio, for a reader."""
        lines = [
            f"{len(self.lanes)} lanes, {sum(routed.lane.nbytes for routed in self.lanes)} bytes, "
            f"chunks of {self.chunk_nbytes} bytes",
            *self.promise(),
        ]
        for routed in self.lanes:
            lane = routed.lane
            lines.append(f"{lane.key}: {lane.nbytes} bytes from {lane.origin} to {len(lane.receivers)} holders")
            for stripe, tree in enumerate(routed.trees):
                label = f"  stripe {stripe}: " if len(routed.trees) > 1 else "  "
                lines += [
                    f"{label}{routed.parent(stripe, place)} -> {receiver} ({tree.paths[place]})"
                    for place, receiver in enumerate(tree.receivers)
                ]
        return "\n".join(lines)


class _SameWay:
    """Lanes to the same receivers whose origins are placed alike: they take the same trees."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes
        self.nbytes = sum(lane.nbytes for lane in lanes)
        self.trees: tuple[Tree, ...] = ()
        self.load: Load = {}


def route(
    fabric: Fabric,
    lanes: Iterable[Lane],
    *,
    chunk_nbytes: int = 0,
    background: Load | None = None,
    trees: tuple[Tree, ...] = (),
) -> Routing:
    """Trees for all lanes, which move at the same time. `chunk_nbytes` 0: chosen for the depth of the trees.

    `background` is what others send meanwhile; the bound does not count it. `trees`: take these, made before for lanes
    of the same way. Raises PlanError when a receiver cannot be reached by any path that both ends have.
    """
    lanes = tuple(lanes)
    ways = [_SameWay(same) for same in _alike(fabric, lanes)]
    total: Load = dict(background or {})
    for _ in range(NUM_PASSES):
        for way in ways:
            total = plus(total, way.load, -1)
            way.trees = trees or _best(fabric, way, total, chunk_nbytes)
            way.load = load_of(fabric, way.lanes, way.trees)
            total = plus(total, way.load)
    chunk = chunk_nbytes or min((_chunk_for(fabric, b, b.trees, total) for b in ways), default=MAX_CHUNK_NBYTES)
    receiver_s: dict[str, float] = {}
    bound = bound_of(fabric, lanes)
    is_known = bound.time_s > 0 and all(_is_known(fabric, way.lanes[0].origin, way.trees) for way in ways)
    for way in ways if is_known else ():
        for receiver, time_s in times_of(fabric, way.lanes, way.trees, total, chunk).items():
            receiver_s[receiver] = max(time_s, receiver_s.get(receiver, 0.0))
    routed = {lane.key: RoutedLane(lane, way.trees) for way in ways for lane in way.lanes}
    return Routing(
        tuple(routed[lane.key] for lane in lanes),
        chunk,
        max(receiver_s.values(), default=0.0),
        receiver_s,
        bound,
    )


def _is_known(fabric: Fabric, origin: str, trees: Sequence[Tree]) -> bool:
    """Whether both ends of every hop have a known rate; the memory of a host is taken to limit nothing."""
    return all(
        fabric.is_known(origin if parent == ORIGIN else tree.receivers[parent], receiver)
        for tree in trees
        for receiver, parent in zip(tree.receivers, tree.parents, strict=True)
    )


def _alike(fabric: Fabric, lanes: Sequence[Lane]) -> list[list[Lane]]:
    found: defaultdict[object, list[Lane]] = defaultdict(list)
    near: dict[tuple[str, ...], frozenset[str]] = {}
    for lane in lanes:
        found[way_of(fabric, lane, near)].append(lane)
    return list(found.values())


def way_of(fabric: Fabric, lane: Lane, near: dict[tuple[str, ...], frozenset[str]]) -> object:
    """Equal for lanes that have the same ways to go. `near` keeps what was found out for the same receivers before."""
    if lane.receivers not in near:
        around = (place for r in lane.receivers for place in (fabric.island(r), *fabric.networks(r)))
        near[lane.receivers] = frozenset(around)
    places = (fabric.island(lane.origin), *fabric.networks(lane.origin))
    where = tuple(place for place in places if place in near[lane.receivers])
    return lane.receivers, where, fabric.likeness(lane.origin)


def _best(fabric: Fabric, way: _SameWay, others: Load, chunk_nbytes: int) -> tuple[Tree, ...]:
    tried: list[tuple[float, float, tuple[Tree, ...]]] = []
    origin, receivers = way.lanes[0].origin, way.lanes[0].receivers
    for trees in candidates(fabric, origin, receivers):
        if not tried and not _is_known(fabric, origin, trees):
            return trees  # nothing to compare by: the first one is a chain, in which nobody sends a byte twice
        total = plus(others, load_of(fabric, way.lanes, trees))
        chunk = chunk_nbytes or _chunk_for(fabric, way, trees, total)
        times = times_of(fabric, way.lanes, trees, total, chunk).values()
        tried.append((max(times, default=0.0), sum(times), trees))
    if not tried:
        return (spanning_tree(fabric, origin, receivers),)
    last = min(time_s for time_s, _, _ in tried)
    return min(((mean, trees) for time_s, mean, trees in tried if time_s <= SAME * last), key=lambda best: best[0])[1]


def _chunk_for(fabric: Fabric, way: _SameWay, trees: Sequence[Tree], total: Load) -> int:
    """Each of nbytes / c chunks costs `CHUNK_COST_S`, the last receiver waits for some per hop: least if equal."""
    depth = max(tree.depth for tree in trees) - 1
    time_s = max(times_of(fabric, way.lanes, trees, total, 0).values(), default=0.0)
    if depth < 1 or not time_s:
        return MAX_CHUNK_NBYTES
    nbytes = way.nbytes * (CHUNK_COST_S / (time_s * depth * NUM_UNDER_WAY * len(trees))) ** 0.5
    return min(MAX_CHUNK_NBYTES, max(MIN_CHUNK_NBYTES, int(nbytes) // _GRAIN * _GRAIN))
