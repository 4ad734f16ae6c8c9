"""Which element of which origin lies where in a block of memory, kept as boxes while a loader runs. Pure: no torch.

A loader's copies are strided: so many elements, with strides on either side. `boxes_of` cuts such a copy into boxes of
the origin with a place each; a `Memory` keeps the boxes written into it, the last one on top. What has no such form
raises `NotBoxes`, and the caller takes it for computing: never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from wsync.holding import Region
from wsync.sharding import row_strides

MAX_BOXES = 4096
"""Of one memory. A loader that scatters more finely than this is better run than replayed."""


class NotBoxes(Exception):
    """A copy, or what two copies leave of each other, is not a few boxes; the text says what it is."""


@dataclass(frozen=True)
class Layout:
    """Shape and strides (in elements) of memory without gaps and overlaps; its dims may be permuted."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, shape: Sequence[int]) -> Layout:
        return cls(tuple(shape), row_strides(shape))

    @property
    def order(self) -> list[int]:
        """Dims from the widest stride to the narrowest; a dim of one element is never stepped along."""
        return sorted((d for d, size in enumerate(self.shape) if size > 1), key=lambda d: -self.strides[d])

    @property
    def is_dense(self) -> bool:
        expected = 1
        for dim in reversed(self.order):
            if self.strides[dim] != expected:
                return False
            expected *= self.shape[dim]
        return True

    @property
    def is_distinct(self) -> bool:
        """Whether every element has one index, though there may be gaps."""
        reach = 0
        for dim in reversed(self.order):
            if self.strides[dim] <= reach:
                return False
            reach += (self.shape[dim] - 1) * self.strides[dim]
        return True

    def index(self, offset: int) -> list[int]:
        """Index of the element at `offset`."""
        index = [0] * len(self.shape)
        for dim in self.order:
            index[dim], offset = divmod(offset, self.strides[dim])
        return index


@dataclass(frozen=True)
class Axis:
    """`extent` elements, so many elements apart in the origin and in the target."""

    extent: int
    stride: int
    target_stride: int


@dataclass(frozen=True)
class Copy:
    """A strided copy: the element at `offset` of the origin goes to `target_offset` of the target, and so on."""

    axes: tuple[Axis, ...]
    offset: int
    target_offset: int

    def without(self, axis: Axis, step: int = 0) -> Copy:
        """The part of the copy at one step of an axis."""
        axes = list(self.axes)
        axes.remove(axis)
        return Copy(tuple(axes), self.offset + step * axis.stride, self.target_offset + step * axis.target_stride)


@dataclass(frozen=True)
class Box:
    """A region of an origin and its place in a memory, as in `wsync.holding.Place`."""

    origin: Memory
    region: Region
    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]

    def cover(self, num_dims: int) -> list[Region]:
        """The elements of the memory that it fills, as boxes; one, unless it fills them with steps."""
        along: list[list[tuple[int, int]]] = [[] for _ in range(num_dims)]  # (step, extent) per dim of the memory
        for extent, dim, step in zip(self.region.extent, self.dims, self.steps, strict=True):
            if extent > 1:
                along[dim].append((step, extent))
        runs = [_runs(start, steps) for start, steps in zip(self.start, along, strict=True)]
        if math.prod(map(len, runs)) > MAX_BOXES:
            raise NotBoxes("it is scattered over too many places")
        regions = [Region((), ())]
        for choices in runs:
            regions = [Region((*r.offset, o), (*r.extent, e)) for r in regions for o, e in choices]
        return regions

    @property
    def is_plain(self) -> bool:
        """Whether each of its dims runs along a dim of its own of the memory, without steps."""
        used = [(d, s) for e, d, s in zip(self.region.extent, self.dims, self.steps, strict=True) if e > 1]
        return all(step == 1 for _, step in used) and len({dim for dim, _ in used}) == len(used)

    def part(self, inside: Region) -> Box:
        """What it brings to a part of the memory that lies in its cover. Only if it is plain."""
        offset, extent = list(self.region.offset), list(self.region.extent)
        for r, dim in enumerate(self.dims):
            if extent[r] > 1:
                offset[r] += inside.offset[dim] - self.start[dim]
                extent[r] = inside.extent[dim]
        return replace(self, region=Region(tuple(offset), tuple(extent)), start=inside.offset)

    def moved(self, common: Region, onward: Box) -> Box:
        """Where its part `common` gets to when the memory that it fills is itself copied by `onward`."""
        part = self.part(common)
        start = list(onward.start)
        for m, (dim, step) in enumerate(zip(onward.dims, onward.steps, strict=True)):
            start[dim] += (common.offset[m] - onward.region.offset[m]) * step
        is_line = [extent > 1 for extent in part.region.extent]
        dims = tuple(onward.dims[d] if line else 0 for d, line in zip(part.dims, is_line, strict=True))
        steps = tuple(onward.steps[d] if line else 1 for d, line in zip(part.dims, is_line, strict=True))
        return Box(self.origin, part.region, tuple(start), dims, steps)


@dataclass(eq=False)
class Memory:
    """A block of memory under the loader's hands: an origin (a tensor that is loaded, or a constant), a parameter,
    or the loader's own scratch.

    `boxes` never overlap. `free` is what is not written: neither by them nor, if it is no copy, by what is done
    instead. `sources` names every tensor that ever went in. Once `why` says why it is no copy, it stays so.
    """

    layout: Layout
    dtype: str
    names: tuple[str, ...] = ()
    is_origin: bool = False
    value: object = None
    """Of a constant: a number for all of its elements, or a tensor."""
    sources: set[str] = field(default_factory=set)
    boxes: list[Box] = field(default_factory=list)
    free: list[Region] = field(default_factory=list)
    why: str = ""
    is_vague: bool = False
    """Something is written of which it is not known where: of `free`, too, nothing is known."""
    is_overwritten: bool = False
    rivals: tuple[str, str] | None = None
    """Two tensors of which the second went over the first."""

    def __post_init__(self) -> None:
        if not self.is_origin:
            self.free = [Region.whole(self.layout.shape)]

    @property
    def has_content(self) -> bool:
        return self.is_origin or bool(self.sources) or bool(self.boxes) or bool(self.why)

    def refuse(self, why: str, sources: Iterable[str] = ()) -> None:
        self.why = self.why or why
        self.sources |= set(sources)

    def touch(self, copy: Copy | None) -> None:
        """A strided part is written, by whatever; None: nobody knows which."""
        try:
            if copy is None or not self.layout.is_distinct:
                raise NotBoxes("it is written nobody knows where")
            extents = [axis.extent for axis in copy.axes]
            strides = row_strides(extents)
            axes = [replace(axis, stride=stride) for axis, stride in zip(copy.axes, strides, strict=True)]
            origin = Memory(Layout.contiguous(extents), self.dtype, is_origin=True)
            for box in boxes_of(Copy(tuple(axes), 0, copy.target_offset), origin, self.layout):
                self._fill(box)
            if len(self.free) > MAX_BOXES:
                raise NotBoxes("it is written in too many places")
        except NotBoxes:
            self.is_vague = True

    def copy(self, origin: Memory, copy: Copy) -> None:
        """Write a strided part of another memory; what has no form is refused with its reason."""
        self.sources |= origin.sources
        if self.why or origin.why:
            self.touch(copy)
            return self.refuse(origin.why)
        try:
            if not self.layout.is_dense:
                raise NotBoxes("the memory has gaps")
            boxes = list(boxes_of(copy, origin, self.layout))
            for box in boxes if origin.is_origin else list(_through(origin, boxes)):
                self._write(box)
        except NotBoxes as exc:
            self.refuse(str(exc))
            self.touch(copy)
        return None

    def _write(self, box: Box) -> None:
        if len(self.boxes) >= MAX_BOXES:
            raise NotBoxes("it is loaded from too many places")
        for region in box.cover(len(self.layout.shape)):
            if not any(free.contains(region) for free in self.free):
                self._uncover(region, box)
        self._fill(box)
        self.boxes.append(box)

    def _fill(self, box: Box) -> None:
        for region in box.cover(len(self.layout.shape)):
            self.free = [rest for free in self.free for rest in minus(free, region)]

    def _uncover(self, region: Region, above: Box) -> None:
        kept: list[Box] = []
        for box in self.boxes:
            cover = box.cover(len(self.layout.shape))
            common = [part for part in map(region.intersect, cover) if part]
            if not common:
                kept.append(box)
                continue
            self.is_overwritten |= bool(box.origin.names)
            if above.origin.names and box.origin.names and above.origin is not box.origin:
                self.rivals = (box.origin.names[0], above.origin.names[0])
            if not all(map(region.contains, cover)):
                if not box.is_plain:
                    raise NotBoxes("it is written twice, and what is left of the first writing is no box")
                kept += [box.part(rest) for rest in minus(cover[0], region)]
        self.boxes = kept


def minus(a: Region, b: Region) -> list[Region]:
    """The boxes that are left of `a` without `b`."""
    common = a.intersect(b)
    if common is None:
        return [a] if a.numel else []
    rest: list[Region] = []
    low, high = list(a.offset), list(a.end)
    for dim in range(len(low)):
        for begin, end in ((low[dim], common.offset[dim]), (common.end[dim], high[dim])):
            if begin < end:
                offset, stop = (*low[:dim], begin, *low[dim + 1 :]), (*high[:dim], end, *high[dim + 1 :])
                rest.append(Region(offset, tuple(e - o for o, e in zip(offset, stop, strict=True))))
        low[dim], high[dim] = common.offset[dim], common.end[dim]
    return rest


def boxes_of(copy: Copy, origin: Memory, target: Layout) -> Iterator[Box]:
    """Cut a copy into boxes of the origin, each with a place in the target."""
    pending, made = [copy], 0
    while pending:
        found = _cut(pending.pop(), origin, target)
        if isinstance(found, Box):
            made += 1
            yield found
        else:
            pending += reversed(found)
        if made + len(pending) > MAX_BOXES:
            raise NotBoxes("it is taken from too many places")


def _cut(copy: Copy, origin: Memory, target: Layout) -> Box | list[Copy]:
    """The one box that the copy is, or smaller copies (or the same one with its axes cut otherwise)."""
    if any(axis.extent == 0 for axis in copy.axes):
        return []
    copy = replace(copy, axes=tuple(axis for axis in copy.axes if axis.extent > 1))
    for axis in copy.axes:
        if axis.target_stride == 0:
            raise NotBoxes("several elements are written onto one")
        if axis.stride == 0:
            return _singly(copy, axis)
    index, target_index = origin.layout.index(copy.offset), target.index(copy.target_offset)
    dims: list[tuple[int, int]] = []
    target_dims: list[tuple[int, int]] = []
    for layout, at, found in ((origin.layout, index, dims), (target, target_index, target_dims)):
        reach = list(at)
        for axis in copy.axes:
            stride = axis.stride if found is dims else axis.target_stride
            dim = next((d for d in layout.order if 0 < layout.strides[d] <= stride), None)
            if dim is None or stride % layout.strides[dim]:
                return _singly(copy, axis)
            step = stride // layout.strides[dim]
            reach[dim] += (axis.extent - 1) * step
            if reach[dim] >= layout.shape[dim]:
                return _at_border(copy, axis, at[dim], step, layout.shape[dim])
            found.append((dim, step))
    lines = sorted(
        ((*source, *goal, axis) for axis, source, goal in zip(copy.axes, dims, target_dims, strict=True)),
        key=lambda line: line[:2],
    )
    return _as_box(copy, lines, origin, index, target_index)


def _as_box(
    copy: Copy, lines: list[tuple[int, int, int, int, Axis]], origin: Memory, index: list[int], start: list[int]
) -> Box | list[Copy]:
    """A box, if along each dim of the origin runs one unbroken line. `lines`: dim, step, target dim, its step, axis,
    by dim and rising step."""
    extent, dims, steps = [1] * len(index), [0] * len(index), [1] * len(index)
    for dim, step, target_dim, target_step, axis in lines:
        if extent[dim] == 1 and step == 1:
            extent[dim], dims[dim], steps[dim] = axis.extent, target_dim, target_step
        elif extent[dim] > 1 and (step, target_dim, target_step) == (
            extent[dim],
            dims[dim],
            extent[dim] * steps[dim],
        ):
            extent[dim] *= axis.extent
        else:
            return _singly(copy, axis)
    return Box(origin, Region(tuple(index), tuple(extent)), tuple(start), tuple(dims), tuple(steps))


def _singly(copy: Copy, axis: Axis) -> list[Copy]:
    if axis.extent > MAX_BOXES:
        raise NotBoxes("it is taken from too many places")
    return [copy.without(axis, step) for step in range(axis.extent)]


def _at_border(copy: Copy, axis: Axis, at: int, step: int, size: int) -> list[Copy]:
    """Cut an axis that runs over the end of a dim: into two axes if it does so evenly, else at the end."""
    rest, per_row = copy.without(axis), size // step
    if size % step == 0 and at < step and axis.extent % per_row == 0 and 1 < per_row < axis.extent:
        rows = Axis(axis.extent // per_row, axis.stride * per_row, axis.target_stride * per_row)
        return [replace(rest, axes=(*rest.axes, rows, replace(axis, extent=per_row)))]
    before = -(-(size - at) // step)
    if before >= axis.extent:
        return _singly(copy, axis)
    after = copy.without(axis, before)
    return [
        replace(rest, axes=(*rest.axes, replace(axis, extent=before))),
        replace(after, axes=(*after.axes, replace(axis, extent=axis.extent - before))),
    ]


def _through(memory: Memory, onward: list[Box]) -> Iterator[Box]:
    """Copies out of a memory, as copies out of the origins of what lies in it."""
    for reading in onward:
        missing = reading.region.numel
        for box in memory.boxes:
            cover = box.cover(len(memory.layout.shape))
            common = [part for part in map(reading.region.intersect, cover) if part]
            if common and not box.is_plain:
                raise NotBoxes("it goes through scratch memory in which it is scattered")
            for part in common:
                missing -= part.numel
                yield box.moved(part, reading)
        if missing:
            raise NotBoxes("it copies memory into which nothing was loaded")


def _runs(start: int, along: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs (offset, extent) of the indices that some (step, extent) reach from a start."""
    length, offsets = 1, [start]
    for step, extent in sorted(along):
        if step == length and len(offsets) == 1:
            length *= extent
        elif len(offsets) * extent > MAX_BOXES:
            raise NotBoxes("it is scattered over too many places")
        else:
            offsets = [offset + k * step for offset in offsets for k in range(extent)]
    return [(offset, length) for offset in offsets]
