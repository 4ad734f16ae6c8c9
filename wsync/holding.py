"""What a member has or wants of a model's tensors, and where that lies in its memory. Pure: no tensors, no I/O.

Both sides speak of the same *tensors*: whole, named as in a checkpoint, of one global shape. A member has *locals*:
the blocks of memory that it really holds, cut and fused as its framework likes. A `Piece` ties a region of a tensor to
a place in a local. A trainer's holding says what it has, a worker's what it wants; everything that cuts, fuses,
transposes or pads is said by pieces, so that planning knows nothing of frameworks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from wsync.errors import ManifestMismatch
from wsync.manifest import ITEMSIZE, TensorSpec

CHECKPOINT = "checkpoint:"
"""Begins the name of a local that is no live memory: a whole tensor, received for the engine's own loader."""


class Region(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An n-d box of one tensor: in every dim `[offset, offset + extent)`."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.extent) or any(o < 0 for o in self.offset) or any(e < 0 for e in self.extent):
            raise ManifestMismatch(f"a region at {self.offset} of {self.extent} is no box")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + e for o, e in zip(self.offset, self.extent, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The common box; None when no element is common."""
        offset = tuple(map(max, self.offset, other.offset))
        extent = tuple(min(a, b) - o for a, b, o in zip(self.end, other.end, offset, strict=True))
        return Region(offset, extent) if all(e > 0 for e in extent) else None

    def contains(self, other: Region) -> bool:
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.end, other.offset, other.end, strict=True)
        )  # fmt: skip

    def lies_in(self, shape: Sequence[int]) -> bool:
        """Whether it is a box of a tensor of that shape."""
        return len(self.end) == len(shape) and all(end <= size for end, size in zip(self.end, shape, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + e}" for o, e in zip(self.offset, self.extent, strict=True)) + "]"


class Place(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Where a region lies in a local: its first element is at index `start`; a step along dim d of the region is one
    of `steps[d]` along dim `dims[d]` of the local.

    Dims may be permuted (a transposed tensor), left out (one expert of a stack), strided (interleaved rows) and
    repeated (a flattened tensor: `dims=(0, 0), steps=(row length, 1)`).
    """

    local: int
    """Index into the holding's locals."""
    start: tuple[int, ...]
    dims: tuple[int, ...]
    steps: tuple[int, ...]

    def strided(self, strides: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Offset of the first element and stride per dim of the region, in the units of the local's `strides`."""
        offset = sum(s * stride for s, stride in zip(self.start, strides, strict=True))
        return offset, tuple(step * strides[dim] for dim, step in zip(self.dims, self.steps, strict=True))


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A region of a tensor of the holding (`tensor` is its index there), and its place."""

    tensor: int
    region: Region
    place: Place

    def part(self, region: Region) -> Place:
        """The place of a part of the region."""
        start = list(self.place.start)
        for o, base, dim, step in zip(
            region.offset, self.region.offset, self.place.dims, self.place.steps, strict=True
        ):
            start[dim] += (o - base) * step
        return Place(self.place.local, tuple(start), self.place.dims, self.place.steps)


class LocalSpec(msgspec.Struct, frozen=True, array_like=True):
    """A block of memory of a member. `padding` lists boxes of it that belong to no tensor and are the member's own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    padding: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        if any(extent < 0 for extent in self.shape):
            raise ManifestMismatch(f"local '{self.name}' has a negative extent in its shape {list(self.shape)}")
        for box in self.padding:
            if not box.lies_in(self.shape):
                raise ManifestMismatch(f"padding {box} does not lie in local '{self.name}' {list(self.shape)}")


class Holding(msgspec.Struct, frozen=True):
    """`tensors` have their global shapes; their dtype is that of the wire, and of the locals where they are wanted.

    Invariants, checked when built: indices are in range, every region lies in its tensor and every place in its local,
    ranks of regions and places agree. What a worker owes besides is in `engine.overlap.check_wanted`.
    """

    tensors: tuple[TensorSpec, ...]
    locals: tuple[LocalSpec, ...]
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if not (0 <= piece.tensor < len(self.tensors) and 0 <= piece.place.local < len(self.locals)):
                raise ManifestMismatch(f"a piece names tensor {piece.tensor} or local {piece.place.local}: not there")
            spec, local = self.tensors[piece.tensor], self.locals[piece.place.local]
            if not _fits(piece, spec.shape, local.shape):
                raise ManifestMismatch(
                    f"region {piece.region} of '{spec.name}' {list(spec.shape)} does not fit into its place "
                    f"{piece.place} in '{local.name}' {list(local.shape)}"
                )

    def digest(self) -> str:
        """128-bit xxh3 of the encoded holding: equal digests mean equal holdings."""
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(self))

    @property
    def nbytes(self) -> int:
        """Bytes on the wire of all its pieces."""
        return sum(piece.region.numel * ITEMSIZE[self.tensors[piece.tensor].dtype] for piece in self.pieces)


def _fits(piece: Piece, shape: tuple[int, ...], local: tuple[int, ...]) -> bool:
    region, place = piece.region, piece.place
    num_dims = len(region.offset)
    if not region.lies_in(shape) or len(place.dims) != num_dims or len(place.steps) != num_dims:
        return False
    if len(place.start) != len(local):
        return False
    if not region.numel:
        return True
    last = list(place.start)
    for extent, dim, step in zip(region.extent, place.dims, place.steps, strict=True):
        if not 0 <= dim < len(local) or step < 1:
            return False
        last[dim] += (extent - 1) * step
    return all(s >= 0 and e < size for s, e, size in zip(place.start, last, local, strict=True))


class HoldingBuilder:
    """Collects locals and pieces by name."""

    def __init__(self) -> None:
        self._tensors: dict[str, TensorSpec] = {}
        self._locals: dict[str, LocalSpec] = {}
        self._pieces: list[tuple[str, Region, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []

    def tensor(self, name: str, dtype: str, shape: Sequence[int], alias_of: str = "") -> None:
        """Declare a tensor. The same again is fine; another dtype or shape of the same name is an error."""
        spec = TensorSpec(name, dtype, tuple(shape), alias_of)
        if self._tensors.setdefault(name, spec) != spec:
            raise ManifestMismatch(f"'{name}' is declared twice: {self._tensors[name]} and {spec}")

    def local(self, name: str, dtype: str, shape: Sequence[int], padding: Iterable[Region] = ()) -> None:
        if name in self._locals:
            raise ManifestMismatch(f"two locals are named '{name}'")
        self._locals[name] = LocalSpec(name, dtype, tuple(shape), tuple(padding))

    def piece(
        self,
        tensor: str,
        region: Region,
        local: str,
        start: Sequence[int],
        dims: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
    ) -> None:
        """Tie a region of a declared tensor to a place in a declared local; by default dim by dim, densely."""
        num_dims = len(region.extent)
        self._pieces.append(
            (tensor, region, local, tuple(start), tuple(dims or range(num_dims)), tuple(steps or (1,) * num_dims))
        )

    def build(self) -> Holding:
        """Tensors and pieces in canonical order, so that equal holdings are equal however they were built.

        Raises ManifestMismatch for a piece whose tensor or local has not been declared.
        """
        tensors = sorted(self._tensors.values(), key=lambda spec: (bool(spec.alias_of), spec.name))
        number = {spec.name: index for index, spec in enumerate(tensors)}
        local = {name: index for index, name in enumerate(self._locals)}
        for tensor, region, name, *_ in self._pieces:
            if tensor not in number or name not in local:
                lacking = f"local '{name}'" if tensor in number else f"tensor '{tensor}'"
                raise ManifestMismatch(f"{lacking} of the piece {region} of '{tensor}' in '{name}' is not declared")
        pieces = sorted(
            (number[tensor], region, Place(local[name], start, dims, steps))
            for tensor, region, name, start, dims, steps in self._pieces
        )
        return Holding(tuple(tensors), tuple(self._locals.values()), tuple(Piece(*piece) for piece in pieces))
