"""Which bytes go from whom to whom when both sides hold shards: holdings -> fragments -> lanes. Pure.

A model of 70,000 tensors has few layouts: tensors that the same members have and want in the same regions are one
group, and are planned, shipped as records and proved as one. So a lane lists groups (`Bundle`), and its fragments are
written out only where somebody packs or installs them.

A plan proves itself when built (`prove`), from the lanes as they are and not from how they came about.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import xxhash

from wsync.engine.groups import Agreement, Group, Grouper, Layout
from wsync.engine.overlap import Finder, Overlap, overlaps
from wsync.errors import ErrorContext, PlanError
from wsync.holding import Holding, Piece, Place, Region
from wsync.manifest import ITEMSIZE, Manifest, TensorSpec

Key = TypeVar("Key")


class Fragment(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A region of one tensor that moves as a whole: it lies within one piece of everybody who packs or installs it."""

    tensor: str
    """The trainer's name of the payload, never an alias."""
    region: Region


class Bundle(msgspec.Struct, frozen=True, array_like=True):
    """The same region of several tensors: a fragment of each."""

    dtype: str
    """On the wire."""
    region: Region
    tensors: tuple[str, ...]
    """Ascending."""

    @property
    def nbytes(self) -> int:
        return self.region.numel * ITEMSIZE[self.dtype] * len(self.tensors)


class ShardLane(msgspec.Struct, frozen=True, dict=True):
    """All fragments with one source and one set of receiving holdings, in canonical order."""

    lane_id: str
    """Digest of everything below: equal content, equal id."""
    source: int
    """The trainer rank that packs it."""
    receivers: tuple[str, ...]
    """Digests of the holdings that it is installed into, ascending."""
    bundles: tuple[Bundle, ...]
    ties: tuple[tuple[str, str], ...] = ()
    """(alias, tensor): names by which a receiver may want one of the lane's tensors."""

    @functools.cached_property
    def fragments(self) -> tuple[Fragment, ...]:
        """By tensor, then by region."""
        return tuple(Fragment(tensor, region) for tensor, region, _ in self._rows)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """One tensor per fragment, in their order, named after tensor and region."""
        return Manifest(
            tuple(TensorSpec(f"{tensor}{region}", dtype, region.extent) for tensor, region, dtype in self._rows)
        )

    @property
    def nbytes(self) -> int:
        """Of its fragments, without the gaps between them."""
        return sum(bundle.nbytes for bundle in self.bundles)

    @property
    def _rows(self) -> list[tuple[str, Region, str]]:
        return sorted((tensor, bundle.region, bundle.dtype) for bundle in self.bundles for tensor in bundle.tensors)


class ShardPlan(msgspec.Struct, frozen=True, dict=True):
    """All lanes, ordered by source and receivers. `plan_id` is the digest of their ids."""

    plan_id: str
    lanes: tuple[ShardLane, ...]
    unwanted: tuple[str, ...] = ()
    """Tensors that the trainer names and nobody wants."""

    def of_source(self, rank: int) -> tuple[ShardLane, ...]:
        """What this trainer rank packs."""
        return self._by_source.get(rank, ())

    def of_receiver(self, digest: str) -> tuple[ShardLane, ...]:
        """What is installed into a holding with this digest."""
        return self._by_receiver.get(digest, ())

    @property
    def nbytes(self) -> int:
        """Sent by all sources together, each byte counted once however many receive it."""
        return sum(lane.nbytes for lane in self.lanes)

    def explain(self) -> str:
        """Lanes and bytes, in all and by source."""
        lines = [
            f"plan {self.plan_id}: {len(self.lanes)} lanes, {self.nbytes} bytes, "
            f"{len(self._by_source)} sources, {len(self._by_receiver)} receiving holdings"
        ]
        for rank, lanes in self._by_source.items():
            lines.append(f"  trainer rank {rank}: {len(lanes)} lanes, {sum(lane.nbytes for lane in lanes)} bytes")
        for digest, lanes in sorted(self._by_receiver.items()):
            nbytes = sum(lane.nbytes for lane in lanes)
            lines.append(f"  holding {digest[:12]}: {nbytes} bytes from {len(lanes)} lanes")
        return "\n".join(lines)

    @functools.cached_property
    def _by_source(self) -> dict[int, tuple[ShardLane, ...]]:
        return _grouped((lane.source, lane) for lane in self.lanes)

    @functools.cached_property
    def _by_receiver(self) -> dict[str, tuple[ShardLane, ...]]:
        return _grouped((digest, lane) for lane in self.lanes for digest in lane.receivers)


def plan_lanes(held: Mapping[int, Holding], wanted: Mapping[str, Holding]) -> ShardPlan:
    """How the trainer ranks' holdings become what is wanted. `wanted` has one holding per digest.

    Every wanted element comes from exactly one source that has it; sources that have the same are loaded evenly.
    Raises `ManifestMismatch` where the two sides, or two trainer ranks, do not speak of the same tensors, and
    `PlanError` for a wanted region that no rank has. The same input gives the same plan.
    """
    return LanePlanner().plan(held, wanted)


class LanePlanner:
    """Plans again and again: the same input gives the same plan at once; an unchanged trainer is not read again."""

    def __init__(self) -> None:
        self._grouper = Grouper()
        self._last: tuple[dict[int, Holding], frozenset[str], ShardPlan] | None = None

    def plan(self, held: Mapping[int, Holding], wanted: Mapping[str, Holding]) -> ShardPlan:
        """As `plan_lanes`."""
        ours, theirs = dict(held), frozenset(wanted)
        if self._last is not None and theirs == self._last[1] and ours == self._last[0]:
            return self._last[2]
        agreement = self._grouper.agree(held, wanted)
        plan = _Builder(agreement).plan()
        _prove(plan, agreement)
        self._last = (ours, theirs, plan)
        return plan


def prove(plan: ShardPlan, held: Mapping[int, Holding], wanted: Mapping[str, Holding]) -> None:
    """Raise `PlanError` unless every wanted element is written exactly once, by a source that has it."""
    _prove(plan, Grouper().agree(held, wanted))


class _Builder:
    """Chooses sources, gathers bundles into lanes."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._egress: defaultdict[int, int] = defaultdict(int)
        self._lanes: dict[tuple[int, tuple[str, ...]], dict[tuple[Region, str], list[tuple[str, ...]]]] = {}
        self._merged: dict[tuple[int, ...], tuple[str, ...]] = {}
        self._known: dict[int, tuple[bytes, tuple[tuple[str, str], ...]]] = {}
        """Digest and ties of a bundle's tensors, by their identity: many lanes share one tuple."""

    def plan(self) -> ShardPlan:
        shared: list[tuple[Group, Overlap, tuple[str, ...]]] = []
        for group in self._agreement.groups:
            digests = [digest for digest, _ in group.wanted]
            asked = [(index, layout) for index, (_, layout) in enumerate(group.wanted)]
            for overlap in overlaps(group.held, asked):
                receivers = tuple(digests[index] for index in overlap.receivers)
                if not overlap.sources:
                    raise PlanError(
                        f"no trainer rank holds '{group.tensors[0]}'{overlap.region}, which is wanted"
                        + _others(group.tensors),
                        hint="see which ranks should hold it; the ranks' shards together must cover the tensor",
                        context=ErrorContext(phase="plan", peers=tuple(f"holding {d[:12]}" for d in receivers)),
                    )
                if len(overlap.sources) == 1:
                    self._add(overlap.sources[0], receivers, group, overlap.region, group.tensors)
                else:
                    shared.append((group, overlap, receivers))
        # The largest first: what comes last evens out what could not be divided before.
        shared.sort(key=lambda item: -item[1].region.numel * ITEMSIZE[item[0].dtype])
        for group, overlap, receivers in shared:
            for source, tensors in self._dealt(group, overlap):
                self._add(source, receivers, group, overlap.region, tensors)
        lanes = tuple(self._lane(*key, content) for key, content in sorted(self._lanes.items()))
        digest = xxhash.xxh3_64_hexdigest("".join(lane.lane_id for lane in lanes).encode())
        return ShardPlan(digest, lanes, self._agreement.unwanted)

    def _add(
        self, source: int, receivers: tuple[str, ...], group: Group, region: Region, tensors: tuple[str, ...]
    ) -> None:
        bundles = self._lanes.setdefault((source, receivers), {})
        bundles.setdefault((region, group.dtype), []).append(tensors)
        self._egress[source] += region.numel * ITEMSIZE[group.dtype] * len(tensors)

    def _dealt(self, group: Group, overlap: Overlap) -> list[tuple[int, tuple[str, ...]]]:
        """The tensors of a group among the sources of a region: each to the one that sends least so far."""
        nbytes = overlap.region.numel * ITEMSIZE[group.dtype]
        loads = [(self._egress[source], source) for source in overlap.sources]
        heapq.heapify(loads)
        counts: dict[int, int] = dict.fromkeys(overlap.sources, 0)
        for _ in group.tensors:
            load, source = loads[0]
            counts[source] += 1
            heapq.heapreplace(loads, (load + nbytes, source))
        ends = list(itertools.accumulate(counts.values()))
        return [
            (source, group.tensors[end - count : end])
            for (source, count), end in zip(counts.items(), ends, strict=True)
            if count
        ]

    def _lane(
        self,
        source: int,
        receivers: tuple[str, ...],
        content: Mapping[tuple[Region, str], Sequence[tuple[str, ...]]],
    ) -> ShardLane:
        bundles = tuple(
            Bundle(dtype, region, self._one(tensors)) for (region, dtype), tensors in sorted(content.items())
        )
        known = [self._digest(bundle.tensors) for bundle in bundles]
        ties = tuple(sorted({tie for _, own in known for tie in own}))
        parts = [(bundle.dtype, bundle.region, digest) for bundle, (digest, _) in zip(bundles, known, strict=True)]
        lane_id = xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode((source, receivers, parts, ties)))
        return ShardLane(lane_id, source, receivers, bundles, ties)

    def _one(self, lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        if len(lists) == 1:
            return lists[0]
        key = tuple(map(id, lists))
        if key not in self._merged:
            self._merged[key] = tuple(sorted(itertools.chain.from_iterable(lists)))
        return self._merged[key]

    def _digest(self, tensors: tuple[str, ...]) -> tuple[bytes, tuple[tuple[str, str], ...]]:
        if id(tensors) not in self._known:
            there = set(tensors) if self._agreement.ties else set()
            ties = tuple(tie for tie in self._agreement.ties if tie[1] in there)
            self._known[id(tensors)] = xxhash.xxh3_128_digest(msgspec.msgpack.encode(tensors)), ties
        return self._known[id(tensors)]


Delivery = tuple[Region, str, int, tuple[str, ...]]
"""One region of a tensor: region, dtype, source, receivers."""


def _prove(plan: ShardPlan, agreement: Agreement) -> None:
    """Tensors with the same deliveries in the same group are proved as one."""
    deliveries: dict[int, list[Delivery]] = {}
    lists: dict[int, tuple[str, ...]] = {}
    for lane in plan.lanes:
        for bundle in lane.bundles:
            lists[id(bundle.tensors)] = bundle.tensors
            deliveries.setdefault(id(bundle.tensors), []).append(
                (bundle.region, bundle.dtype, lane.source, lane.receivers)
            )
    told: dict[str, list[int]] = {name: [] for group in agreement.groups for name in group.tensors}
    for number, tensors in lists.items():
        for name in tensors:
            if name not in told:
                raise PlanError(f"the plan moves '{name}', which nobody wants")
            told[name].append(number)
    for group in agreement.groups:
        proved: set[tuple[int, ...]] = set()
        for name in group.tensors:
            key = tuple(told[name])
            if key not in proved:
                _prove_tensor(name, group, [delivery for number in key for delivery in deliveries[number]])
                proved.add(key)


def _prove_tensor(name: str, group: Group, deliveries: Sequence[Delivery]) -> None:
    held = {source: Finder(layout) for source, layout in group.held}
    wanted = dict(group.wanted)
    received: dict[str, list[Region]] = {digest: [] for digest in wanted}
    for region, dtype, source, receivers in deliveries:
        if dtype != group.dtype:
            raise PlanError(f"'{name}'{region} would be sent as {dtype}, and it is {group.dtype}")
        if source not in held or not held[source].containing(region):
            raise PlanError(f"trainer rank {source} would send '{name}'{region}, which lies in no piece that it has")
        for digest in receivers:
            if digest not in received:
                raise PlanError(f"'{name}'{region} would be sent to holding {digest[:12]}, which does not want it")
            received[digest].append(region)
    proved: set[tuple[Layout, tuple[Region, ...]]] = set()
    for digest, regions in received.items():
        key = (wanted[digest], tuple(regions))
        if key not in proved:
            _prove_cover(name, digest, *key)
            proved.add(key)


def _prove_cover(name: str, digest: str, pieces: Sequence[Region], regions: Sequence[Region]) -> None:
    """Each piece is covered exactly once by regions that lie within it, and no region lies elsewhere.

    Boxes add up to a box exactly when their corners, with alternating signs, do: a corner's sign is what is left of
    a sum of boxes when it is differenced once along every dim, and that loses nothing.
    """
    finder, left = Finder(pieces), [_corners(piece) for piece in pieces]
    for region in regions:
        within = finder.containing(region)
        if not within:
            raise PlanError(f"'{name}'{region} would be sent to holding {digest[:12]}, which does not want it")
        for corner, sign in _corners(region).items():
            for index in within:
                left[index][corner] = left[index].get(corner, 0) - sign
    for piece, rest in zip(pieces, left, strict=True):
        if any(rest.values()):
            raise PlanError(f"'{name}'{piece} is not written exactly once in holding {digest[:12]}")


def _corners(region: Region) -> dict[tuple[int, ...], int]:
    corners: dict[tuple[int, ...], int] = {(): 1}
    for offset, end in zip(region.offset, region.end, strict=True):
        corners = {
            (*corner, at): sign * side for corner, sign in corners.items() for at, side in ((offset, 1), (end, -1))
        }
    return corners


class Locator:
    """Finds the fragments of lanes in the memory of one holding."""

    def __init__(self, holding: Holding) -> None:
        self._root = {spec.name: spec.alias_of or spec.name for spec in holding.tensors}
        self._pieces: dict[str, list[Piece]] = {}
        for piece in holding.pieces:
            if piece.region.numel:
                self._pieces.setdefault(self._root[holding.tensors[piece.tensor].name], []).append(piece)
        self._finders = {
            root: Finder(piece.region for piece in pieces) for root, pieces in self._pieces.items() if len(pieces) > 1
        }

    def views(self, lane: ShardLane) -> list[tuple[tuple[Place, ...], tuple[int, ...]]]:
        """For each fragment of the lane, in order: all its places, and its extent. A source packs from the first."""
        aliases: dict[str, list[str]] = {}
        for alias, tensor in lane.ties:
            aliases.setdefault(tensor, []).append(alias)
        views: list[tuple[tuple[Place, ...], tuple[int, ...]]] = []
        for fragment in lane.fragments:
            tensor, region = fragment.tensor, fragment.region
            roots = {self._root[name]: None for name in (tensor, *aliases.get(tensor, ())) if name in self._root}
            places = tuple(piece.part(region) for root in roots for piece in self._containing(root, region))
            if not places:
                raise PlanError(f"'{tensor}'{region} of lane {lane.lane_id} is in no piece here")
            views.append((places, region.extent))
        return views

    def _containing(self, root: str, region: Region) -> list[Piece]:
        pieces = self._pieces.get(root, [])
        if root in self._finders:
            return [pieces[i] for i in self._finders[root].containing(region)]
        return [piece for piece in pieces if piece.region.contains(region)]


def _grouped(pairs: Iterable[tuple[Key, ShardLane]]) -> dict[Key, tuple[ShardLane, ...]]:
    found: dict[Key, list[ShardLane]] = {}
    for key, lane in pairs:
        found.setdefault(key, []).append(lane)
    return {key: tuple(lanes) for key, lanes in found.items()}


def _others(tensors: Sequence[str]) -> str:
    return f" (and {len(tensors) - 1} tensors with the same layout)" if len(tensors) > 1 else ""
