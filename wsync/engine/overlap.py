"""Where boxes overlap: fragments of a tensor between two sides, and whether a local is written exactly once. Pure.

Both questions are one: some sets are given, each the product of runs per dim; find the cells on which it does not
change which sets are there. A region is one run per dim. A place in a local is a few runs where its steps leave gaps,
and one where they do not, so that a flattened or interleaved tensor of any size costs its runs and no mask.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from wsync.errors import ManifestMismatch
from wsync.holding import Holding, Piece, Region

Span = tuple[int, int]
Runs = tuple[Span, ...]
Cell = tuple[tuple[Span, ...], frozenset[int]]
"""A span per dim, and the numbers of the sets that are there."""


class Overlap(msgspec.Struct, frozen=True):
    """A maximal region that the same pieces hold and the same pieces want; it lies within each of these pieces."""

    region: Region
    sources: tuple[int, ...]
    """Numbers of the holders that have it, ascending."""
    receivers: tuple[int, ...]
    """Numbers of the holdings that want it, ascending."""


def overlaps(
    held: Sequence[tuple[int, Sequence[Region]]], wanted: Sequence[tuple[int, Sequence[Region]]]
) -> list[Overlap]:
    """What must move of one tensor, in the order of the regions. `held` and `wanted` say who has which regions.

    The result covers every wanted element exactly once; a region that nobody holds has no `sources`. Neither side
    may name an empty region.
    """
    regions = [region for _, owned in (*held, *wanted) for region in owned]
    owners = [number for number, owned in (*held, *wanted) for _ in owned]
    num_held = sum(len(owned) for _, owned in held)
    if not regions:
        return []
    num_dims = len(regions[0].offset)
    cells = _cells([_box(region) for region in regions], num_dims, lambda there: max(there) >= num_held)
    found: list[Overlap] = []
    for spans, there in _merged(cells):
        region = Region(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))
        sources = {owners[i] for i in there if i < num_held}
        receivers = {owners[i] for i in there if i >= num_held}
        found.append(Overlap(region, tuple(sorted(sources)), tuple(sorted(receivers))))
    return sorted(found, key=lambda overlap: overlap.region)


class Finder:
    """Finds those of many boxes that contain another one, without looking at all of them."""

    def __init__(self, boxes: Iterable[Region]) -> None:
        self._boxes = list(boxes)
        num_dims = len(self._boxes[0].offset) if self._boxes else 0
        # The dim along which they are cut most; where there is none, all are looked at.
        self._dim = max(range(num_dims), key=lambda dim: len({box.offset[dim] for box in self._boxes}), default=-1)
        if self._dim < 0:
            return
        self._order = sorted(range(len(self._boxes)), key=lambda i: self._boxes[i].offset[self._dim])
        self._starts = [self._boxes[i].offset[self._dim] for i in self._order]
        self._longest = max(box.extent[self._dim] for box in self._boxes)

    def containing(self, region: Region) -> list[int]:
        """Numbers of the boxes, ascending."""
        if self._dim < 0:
            return list(range(len(self._boxes)))
        start = region.offset[self._dim]
        low = bisect.bisect_right(self._starts, start - self._longest)
        high = bisect.bisect_right(self._starts, start)
        return sorted(i for i in self._order[low:high] if self._boxes[i].contains(region))


def check_wanted(holding: Holding) -> None:
    """Raise `ManifestMismatch` unless every element of every local is written exactly once or is padding.

    Also where a local has another dtype than the tensor that is written there: casts are made by sources only.
    """
    pieces: list[list[Piece]] = [[] for _ in holding.locals]
    for piece in holding.pieces:
        if piece.region.numel:
            pieces[piece.place.local].append(piece)
    for local, written in zip(holding.locals, pieces, strict=True):
        for piece in written:
            spec = holding.tensors[piece.tensor]
            if spec.dtype != local.dtype:
                raise ManifestMismatch(
                    f"'{spec.name}' is wanted as {spec.dtype}, but its local '{local.name}' is {local.dtype}",
                    hint="want a tensor in the dtype of its memory; the trainer casts it once",
                )
        if not math.prod(local.shape):
            continue
        num_dims = len(local.shape)
        sets = [_image(piece, num_dims, local.name) for piece in written]
        num_pieces = len(sets)
        sets += [_box(region) for region in (*local.padding, Region.whole(local.shape)) if region.numel]
        for spans, there in _cells(sets, num_dims):
            writers = [written[i] for i in there if i < num_pieces]
            is_padding = len(there) > len(writers) + 1
            if len(writers) != (0 if is_padding else 1):
                index = [a for a, _ in spans]
                by = " and ".join(f"'{holding.tensors[w.tensor].name}'{w.region}" for w in writers) or "no tensor"
                also = ", though it is padding" if is_padding else ""
                raise ManifestMismatch(
                    f"'{local.name}'{index} is written by {by}{also}",
                    hint="every element of a local is written exactly once, or is declared as padding",
                )


def _cells(
    sets: Sequence[Sequence[Runs]], num_dims: int, is_needed: Callable[[frozenset[int]], bool] = bool
) -> list[Cell]:
    """The cells of the space that these sets cover; those where `is_needed` denies it are left out.

    Dim by dim: only sets that meet in one dim are compared in the next, so that cuts multiply only where they meet.
    """

    def below(dim: int, alive: frozenset[int]) -> list[Cell]:
        if dim == num_dims:
            return [((), alive)]
        known: dict[frozenset[int], list[Cell]] = {}
        found: list[Cell] = []
        for span, there in _spans(sets, dim, alive):
            if not is_needed(there):
                continue
            if there not in known:
                known[there] = below(dim + 1, there)
            found += [((span, *rest), key) for rest, key in known[there]]
        return found

    alive = frozenset(range(len(sets)))
    return below(0, alive) if sets and is_needed(alive) else []


def _spans(sets: Sequence[Sequence[Runs]], dim: int, alive: frozenset[int]) -> list[tuple[Span, frozenset[int]]]:
    """One dim: maximal spans with the same sets there."""
    if len({sets[i][dim] for i in alive}) == 1:
        (runs,) = {sets[i][dim] for i in alive}
        return [(run, alive) for run in runs]
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for i in alive:
        for a, b in sets[i][dim]:
            begins.setdefault(a, []).append(i)
            ends.setdefault(b, []).append(i)
    found: list[tuple[Span, frozenset[int]]] = []
    there: set[int] = set()
    start = 0
    for cut in sorted(begins.keys() | ends.keys()):
        if there:
            found.append(((start, cut), frozenset(there)))
        there.difference_update(ends.get(cut, ()))
        there.update(begins.get(cut, ()))
        start = cut
    return found


def _merged(cells: Sequence[Cell]) -> list[Cell]:
    """Neighbours with the same sets joined where they make a box, along the last dim first."""
    num_dims = len(cells[0][0]) if cells else 0
    for dim in reversed(range(num_dims)):
        rows: dict[tuple[tuple[Span, ...], frozenset[int]], list[Span]] = {}
        for spans, there in cells:
            rows.setdefault((spans[:dim] + spans[dim + 1 :], there), []).append(spans[dim])
        cells = [
            ((*rest[:dim], run, *rest[dim:]), there) for (rest, there), row in rows.items() for run in _joined(row)
        ]
    return list(cells)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order, those that touch made one."""
    joined: list[Span] = []
    for a, b in sorted(spans):
        if joined and joined[-1][1] == a:
            joined[-1] = (joined[-1][0], b)
        else:
            joined.append((a, b))
    return joined


def _box(region: Region) -> tuple[Runs, ...]:
    return tuple(((o, o + e),) for o, e in zip(region.offset, region.extent, strict=True))


def _image(piece: Piece, num_dims: int, local: str) -> tuple[Runs, ...]:
    """The indices that a piece writes, as runs per dim of its local."""
    place = piece.place
    walks: list[list[tuple[int, int]]] = [[] for _ in range(num_dims)]
    for extent, dim, step in zip(piece.region.extent, place.dims, place.steps, strict=True):
        walks[dim].append((step, extent))
    runs: list[Runs] = []
    for dim, walk in enumerate(walks):
        found = _runs(place.start[dim], walk)
        if found is None:
            raise ManifestMismatch(f"region {piece.region} overlaps itself in '{local}': {place} writes an index twice")
        runs.append(found)
    return tuple(runs)


def _runs(start: int, walk: Iterable[tuple[int, int]]) -> Runs | None:
    """The indices start + sum of i * step over all i < extent, as runs; None when two of these are the same index."""
    runs: list[Span] = [(start, start + 1)]
    for step, extent in sorted(walk):
        if extent == 1:
            continue
        if len(runs) == 1 and runs[0][1] - runs[0][0] == step:
            runs = [(runs[0][0], runs[0][0] + step * extent)]
            continue
        runs = sorted((a + i * step, b + i * step) for i in range(extent) for a, b in runs)
        if any(ahead[1] > behind[0] for ahead, behind in itertools.pairwise(runs)):
            return None
        runs = _joined(runs)
    return tuple(runs)
