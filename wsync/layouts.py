"""What a framework keeps in memory: blocks that fuse, cut, pad, stack, transpose and flatten whole tensors. Pure.

A `Block` is one local. It is made of an arrangement per dim (`wsync.arrangements`; most dims are whole), can then be
transposed, stacked, cut by a sharding or flattened, and at last is added to a `HoldingBuilder`. Both sides use the
same functions: a trainer for what it has, an engine for what it wants.

    qkv = joined(heads("q", 16, 256, tp), kv_heads("k", 2, 256, tp), kv_heads("v", 2, 256, tp))
    weight = block(("q_proj.weight", "k_proj.weight", "v_proj.weight"), (qkv, 2048))
    weight.add(builder, "qkv_proj.weight", "bfloat16")
    block(("q_proj.bias", "k_proj.bias", "v_proj.bias"), (qkv,)).add(builder, "qkv_proj.bias", "bfloat16")
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import msgspec

from wsync.arrangements import Arrangement, whole
from wsync.errors import ManifestMismatch
from wsync.holding import HoldingBuilder, Region
from wsync.sharding import Cut, flat_range, row_strides


class Patch(msgspec.Struct, frozen=True, array_like=True):
    """A region of a tensor and its place in a block, as `wsync.holding.Place` says it."""

    tensor: str
    region: Region
    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]


class Block(msgspec.Struct, frozen=True):
    """A tensor as a framework keeps it, made of patches of whole tensors. Every change gives a new block."""

    shape: tuple[int, ...]
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Name and global shape of the tensors that it has patches of."""
    patches: tuple[Patch, ...]
    padding: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        if len(dict(self.tensors)) != len(self.tensors):
            raise ManifestMismatch(f"a tensor of a block has two shapes: {sorted(self.tensors)}")

    def transposed(self, order: Sequence[int]) -> Block:
        """Dim `order[d]` becomes dim d, as `numpy.transpose` does."""
        if sorted(order) != list(range(len(self.shape))):
            raise ManifestMismatch(
                f"{list(order)} is no order of the dims of {list(self.shape)}, a block of {list(dict(self.tensors))}"
            )
        new = {old: dim for dim, old in enumerate(order)}

        def turn(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[old] for old in order)

        patches = (
            Patch(p.tensor, p.region, turn(p.start), tuple(new[d] for d in p.dims), p.steps) for p in self.patches
        )
        padding = (Region(turn(box.offset), turn(box.extent)) for box in self.padding)
        return Block(turn(self.shape), self.tensors, tuple(patches), tuple(padding))

    def cut(self, held: Iterable[Cut], shape: Sequence[int]) -> Block:
        """What a rank has of the block if its local has `shape` and holds these cuts of it (`wsync.sharding.cuts`)."""
        patches: list[Patch] = []
        padding: list[Region] = []
        for window, at in map(msgspec.structs.astuple, held):
            shift = [a - o for a, o in zip(at, window.offset, strict=True)]
            for p in filter(None, (_clipped(patch, window) for patch in self.patches)):
                patches.append(Patch(p.tensor, p.region, _sum(p.start, shift), p.dims, p.steps))
            for box in filter(None, (own.intersect(window) for own in self.padding)):
                padding.append(Region(_sum(box.offset, shift), box.extent))
        return _block(tuple(shape), self.tensors, patches, padding)

    def add(self, builder: HoldingBuilder, local: str, dtype: str, wire_dtype: str = "") -> None:
        """Declare the local, its tensors and its pieces. The wire has the local's dtype unless another is given."""
        builder.local(local, dtype, self.shape, self.padding)
        for name, shape in self.tensors:
            builder.tensor(name, wire_dtype or dtype, shape)
        for p in self.patches:
            builder.piece(p.tensor, p.region, local, p.start, p.dims, p.steps)


def block(names: Sequence[str], dims: Sequence[Arrangement | int]) -> Block:
    """A block of one tensor, or of several fused along the one dim whose arrangement has several parts.

    `dims` has one entry per dim; a number is a whole dim. `names[p]` is the tensor that is part p.
    """
    ways = [whole(dim) if isinstance(dim, int) else dim for dim in dims]
    fused = [dim for dim, way in enumerate(ways) if len(way.sizes) > 1]
    if len(fused) > 1 or len(set(names)) != len(names) or len(names) != (len(ways[fused[0]].sizes) if fused else 1):
        raise ManifestMismatch(
            f"names {list(names)} do not suit parts of {[list(way.sizes) for way in ways]}",
            hint="give one name per part of the fused dim, and fuse along one dim",
        )
    shapes = [
        tuple(way.sizes[part if dim in fused else 0] for dim, way in enumerate(ways)) for part in range(len(names))
    ]
    patches = tuple(
        Patch(
            names[runs[fused[0]].part if fused else 0],
            Region(tuple(r.begin for r in runs), tuple(r.extent for r in runs)),
            tuple(r.at for r in runs),
            tuple(range(len(ways))),
            tuple(r.step for r in runs),
        )
        for runs in itertools.product(*(way.runs for way in ways))
    )
    return _block(tuple(way.extent for way in ways), zip(names, shapes, strict=True), patches, _padding(ways))


def stacked(blocks: Sequence[Block]) -> Block:
    """Blocks of the same shape behind one another in a new first dim: the experts of a rank, slot by slot."""
    shapes = {one.shape for one in blocks}
    if len(shapes) != 1:
        raise ManifestMismatch(f"blocks of shapes {sorted(shapes)} cannot be stacked")
    patches: list[Patch] = []
    padding: list[Region] = []
    for slot, one in enumerate(blocks):
        for p in one.patches:
            patches.append(Patch(p.tensor, p.region, (slot, *p.start), tuple(d + 1 for d in p.dims), p.steps))
        padding += [Region((slot, *box.offset), (1, *box.extent)) for box in one.padding]
    tensors = dict.fromkeys(tensor for one in blocks for tensor in one.tensors)
    return Block((len(blocks), *shapes.pop()), tuple(tensors), tuple(patches), tuple(padding))


def flattened(blocks: Iterable[tuple[int, Block]], start: int, stop: int) -> Block:
    """The elements [start, stop) of a flat buffer as a 1-d block; each block lies flattened at its offset there.

    What no block fills is padding: alignment between the blocks, and the end of the buffer. Blocks that overlap are
    refused on every rank, also where [start, stop) has nothing of them.
    """
    if not 0 <= start <= stop:
        raise ManifestMismatch(f"elements {start}:{stop} are no stretch of a flat buffer")
    blocks = list(blocks)
    free = 0
    for offset, one in sorted(blocks, key=lambda entry: (entry[0], math.prod(entry[1].shape))):
        if offset < free:
            raise ManifestMismatch(
                f"the block of {list(dict(one.tensors))} at {offset} of a flat buffer begins before {free}, where the "
                "one before it ends"
            )
        free = offset + math.prod(one.shape)
    patches: list[Patch] = []
    filled: list[tuple[int, int]] = []
    padding: list[Region] = []
    tensors: dict[tuple[str, tuple[int, ...]], None] = {}
    for offset, one in blocks:
        tensors.update(dict.fromkeys(one.tensors))
        strides = row_strides(one.shape)
        first = max(start - offset, 0)
        for window, (at,) in map(msgspec.structs.astuple, flat_range(one.shape, first, stop - offset)):
            # Index of the local of what has index 0, ..., 0 in the block; a window is one stretch of it.
            base = at + offset + first - start - _dot(window.offset, strides)
            filled.append((base + _dot(window.offset, strides), window.numel))
            for p in filter(None, (_clipped(patch, window) for patch in one.patches)):
                steps = tuple(step * strides[dim] for dim, step in zip(p.dims, p.steps, strict=True))
                patches.append(Patch(p.tensor, p.region, (base + _dot(p.start, strides),), (0,) * len(p.dims), steps))
            for box in filter(None, (own.intersect(window) for own in one.padding)):
                padding += [Region((base + begin,), (extent,)) for begin, extent in _stretches(box, one.shape)]
    end = 0
    for at, extent in [*sorted(filled), (stop - start, 0)]:
        padding += [Region((end,), (at - end,))] if at > end else []
        end = at + extent
    return _block((stop - start,), tensors, patches, padding)


def expert_names(stacked_name: str, expert: int) -> tuple[str, ...]:
    """The checkpoint's names for one expert of a stacked tensor, with or without the suffix `.weight`.

    `mlp.experts.gate_up_proj` has `mlp.experts.3.gate_proj.weight` and `mlp.experts.3.up_proj.weight`.
    """
    prefix, found, last = stacked_name.removesuffix(".weight").rpartition("experts.")
    stem, suffix = (last.removesuffix("_bias"), "bias") if last.endswith("_bias") else (last, "weight")
    projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stem)
    if not found or projections is None:
        raise ManifestMismatch(
            f"'{stacked_name}' is no stacked expert tensor that wsync knows",
            hint="it knows experts.gate_up_proj and experts.down_proj; give the names of others yourself",
        )
    return tuple(f"{prefix}experts.{expert}.{projection}.{suffix}" for projection in projections)


def _block(
    shape: tuple[int, ...],
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    patches: Iterable[Patch],
    padding: Iterable[Region],
) -> Block:
    """A block with only those tensors that it has something of; a tensor without elements stays."""
    patches = tuple(patches)
    used = {patch.tensor for patch in patches}
    kept = tuple((name, size) for name, size in tensors if name in used or 0 in size)
    return Block(shape, kept, patches, tuple(padding))


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _clipped(patch: Patch, window: Region) -> Patch | None:
    """The part of a patch that lies in a window of its block, still in the block's indices."""
    if len(set(patch.dims)) < len(patch.dims):
        raise ManifestMismatch(f"'{patch.tensor}' is flattened already", hint="cut a block first, then flatten it")
    offset, extent, start = list(patch.region.offset), list(patch.region.extent), list(patch.start)
    for dim, (low, high) in enumerate(zip(window.offset, window.end, strict=True)):
        if dim not in patch.dims:
            if not low <= start[dim] < high:
                return None
            continue
        own = patch.dims.index(dim)
        step = patch.steps[own]
        first = max(0, -(-(low - start[dim]) // step))
        last = min(extent[own], -(-(high - start[dim]) // step))
        if first >= last:
            return None
        offset[own] += first
        extent[own] = last - first
        start[dim] += first * step
    return Patch(patch.tensor, Region(tuple(offset), tuple(extent)), tuple(start), patch.dims, patch.steps)


def _padding(ways: Sequence[Arrangement]) -> Iterable[Region]:
    """Boxes that are padding in at least one dim, none of them twice: in earlier dims only what is no padding."""
    for dim, way in enumerate(ways):
        spans = [earlier.unpadded() for earlier in ways[:dim]]
        spans += [way.padding, *(((0, later.extent),) for later in ways[dim + 1 :])]
        for box in itertools.product(*spans):
            yield Region(tuple(at for at, _ in box), tuple(extent for _, extent in box))


def _stretches(box: Region, shape: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The box in a flattened tensor of that shape, as (offset, extent)."""
    strides = row_strides(shape)
    inner = max((dim for dim, size in enumerate(shape) if box.extent[dim] < size), default=0)
    for index in itertools.product(*(range(n) for n in box.extent[:inner])):
        yield _dot(box.offset, strides) + _dot(index, strides[:inner]), box.extent[inner] * strides[inner]
