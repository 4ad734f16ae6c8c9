"""What routes cost: bytes per resource, when each receiver is done, and the time that no routes can beat. Pure.

Lanes move at the same time, chunks are served on as soon as they are there. A hop then takes as long as the busiest of
its resources (bytes / rate), a receiver as long as the slowest hop above it, and one chunk more for every hop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from wsync.engine.fabric import Fabric, Hop
from wsync.engine.route_trees import ORIGIN, Tree
from wsync.errors import PlanError

if TYPE_CHECKING:
    from wsync.engine.routes import Lane

Load = dict[str, float]
"""Resource -> bytes."""


class Bound(msgspec.Struct, frozen=True):
    """No routes are faster: so many bytes must pass what is that narrow. 0 and no formula if no rate is known."""

    time_s: float
    formula: str


def load_of(fabric: Fabric, lanes: Sequence[Lane], trees: Sequence[Tree]) -> Load:
    """Bytes through each resource when all these lanes, which have the same receivers, take these trees."""
    load: Load = {}
    nbytes = sum(lane.nbytes for lane in lanes) / len(trees)
    for tree in trees:
        for place, receiver in enumerate(tree.receivers):
            parent = tree.parents[place]
            if parent != ORIGIN:
                _add(load, _hop(fabric, tree.receivers[parent], receiver), nbytes)
            else:
                for lane in lanes:
                    _add(load, _hop(fabric, lane.origin, receiver), lane.nbytes / len(trees))
    return load


def plus(load: Load, other: Load, sign: int = 1) -> Load:
    """Both together, or `load` without `other`; neither is changed."""
    total = dict(load)
    for resource, nbytes in other.items():
        total[resource] = max(0.0, total.get(resource, 0.0) + sign * nbytes)
    return total


def times_of(
    fabric: Fabric, lanes: Sequence[Lane], trees: Sequence[Tree], total: Load, chunk_nbytes: int
) -> dict[str, float]:
    """Receiver -> seconds until it has all of these lanes. `total` is all that moves meanwhile, these included."""
    times: dict[str, float] = {}
    # All lanes from one holder to another share a connection, where their chunks come one after another.
    nbytes = max(1.0, sum(lane.nbytes for lane in lanes) / len(trees))
    share = min(chunk_nbytes, max(lane.nbytes for lane in lanes) / len(trees)) / nbytes
    for tree in trees:
        done: list[tuple[float, float]] = []
        for place, receiver in enumerate(tree.receivers):
            parent = tree.parents[place]
            if parent != ORIGIN:
                busy, late = done[parent]
                hops = [_hop(fabric, tree.receivers[parent], receiver)]
            else:
                busy, late = 0.0, 0.0
                hops = [_hop(fabric, lane.origin, receiver) for lane in lanes]
            own = max((total[r] / fabric.capacity[r] for hop in hops for r in hop.resources), default=0.0)
            if parent != ORIGIN:
                late += share * own
            done.append((max(busy, own), late + max(hop.overhead_s for hop in hops)))
            times[receiver] = max(times.get(receiver, 0.0), sum(done[-1]))
    return times


def bound_of(fabric: Fabric, lanes: Iterable[Lane]) -> Bound:
    """The largest, over nested groups of holders, of bytes that must enter (or leave) it / the rate at which they can.

    That is the cut bound max W(X) / cap(X) (Edmonds 1972; for peers Kumar and Ross, HOTWEB 2006) over the groups that
    the topology names: every holder, host, scale-up domain and network domain.
    """
    groups = _groups(fabric)
    around: dict[str, set[str]] = {node: set() for node in fabric.nodes}
    for name, members in groups.items():
        for member in members:
            around[member].add(name)
    entering: Load = {}
    leaving: Load = {}
    reached: dict[tuple[str, ...], tuple[set[str], set[str]]] = {}
    for lane in lanes:
        if lane.receivers not in reached:
            sets = [around[receiver] for receiver in lane.receivers]
            reached[lane.receivers] = (set().union(*sets), set.intersection(*sets) if sets else set())
        some, every = reached[lane.receivers]
        for name in some - around[lane.origin]:
            entering[name] = entering.get(name, 0.0) + lane.nbytes
        for name in (around[lane.origin] - every) if lane.receivers else ():
            leaving[name] = leaving.get(name, 0.0) + lane.nbytes
    best = Bound(0.0, "")
    for moved, way in ((entering, "in"), (leaving, "out")):
        for name, nbytes in moved.items():
            rate = _rate(fabric, name, groups[name], way)
            if rate and nbytes / rate > best.time_s:
                verb = "enter" if way == "in" else "leave"
                best = Bound(nbytes / rate, f"{nbytes:.4g} bytes must {verb} {name}, at {rate:.4g} bytes/s")
    return best


def _groups(fabric: Fabric) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {node: [node] for node in fabric.nodes}
    for node in fabric.nodes:
        for name in {fabric.island(node), *fabric.networks(node)} - {node}:
            groups.setdefault(name, []).append(node)
    return groups


def _rate(fabric: Fabric, name: str, members: Sequence[str], way: str) -> float:
    """Of all that crosses the group's edge that way; 0 if something of it is unknown."""
    crossed: dict[str, float] = {}
    inside = set(members)
    for member in members:
        for peer in fabric.peers(member, inside):
            hop = fabric.hop(peer, member) if way == "in" else fabric.hop(member, peer)
            if hop is not None:
                own = [resource for resource in hop.resources if resource in fabric.own(member, hop.medium, way)]
                if not own:
                    return 0.0
                crossed |= {resource: fabric.capacity[resource] for resource in own}
    uplink = fabric.uplink(name)
    rate = sum(crossed.values())
    return min(rate, uplink) if uplink else rate


def _hop(fabric: Fabric, source: str, receiver: str) -> Hop:
    hop = fabric.hop(source, receiver)
    if hop is None:
        raise PlanError(f"no path from {source} to {receiver}", hint="allow a transport that both have")
    return hop


def _add(load: Load, hop: Hop, nbytes: float) -> None:
    for resource in hop.resources:
        load[resource] = load.get(resource, 0.0) + nbytes
