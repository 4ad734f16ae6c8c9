"""Which part of a tensor a rank holds: meshes, placements, flat ranges, owners. Pure: no tensors, no torch.

A `Sharding` cuts a tensor over the axes of a mesh as torch's DTensor does, uneven and empty shards included; `cuts`
gives the regions that one rank holds, each with the index where it begins in the rank's local tensor. A `flat_range`
is a stretch of the flattened tensor (FSDP1, ZeRO-3). An `OwnerMap` says which rank has which experts or layers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Region


class Mesh(msgspec.Struct, frozen=True):
    """Ranks in a grid. `ranks` lists them in row-major order of the grid; empty means 0, 1, 2, ...

    A rank's part follows from its place in the grid, never from its number, so that permuted devices and a second
    engine (whose ranks begin elsewhere) are addressed rightly.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        if not self.ranks:
            msgspec.structs.force_setattr(self, "ranks", tuple(range(size)))
        if len(self.axes) != len(self.shape) or len(set(self.axes)) != len(self.axes) or min(self.shape, default=1) < 1:
            raise ConfigError(f"a mesh of shape {self.shape} with axes {self.axes} is none")
        if len(self.ranks) != size or len(set(self.ranks)) != size:
            raise ConfigError(
                f"a mesh of shape {self.shape} has {size} places, not the ranks {list(self.ranks)}",
                hint="list every rank of the mesh once",
            )

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where the rank is, axis by axis."""
        if rank not in self.ranks:
            raise ConfigError(
                f"rank {rank} is not in the mesh of ranks {list(self.ranks)}",
                hint="give the rank in the numbering that the mesh was made with",
            )
        index = self.ranks.index(rank)
        coordinate: list[int] = []
        for size in reversed(self.shape):
            index, place = divmod(index, size)
            coordinate.append(place)
        return tuple(reversed(coordinate))


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """Every rank along the axis has the same."""


class Shard(msgspec.Struct, frozen=True, tag="shard"):
    """The axis cuts `dim` into chunks of the same rounded-up size; the last ones may be smaller or empty."""

    dim: int


class StridedShard(msgspec.Struct, frozen=True, tag="strided_shard"):
    """The axis cuts `dim` within each of `split_factor` chunks of it: how DTensor writes FSDP inside a TP shard."""

    dim: int
    split_factor: int


class Partial(msgspec.Struct, frozen=True, tag="partial"):
    """The ranks along the axis hold summands (or other operands). Nobody holds the value, so it is always refused."""

    reduce_op: str = "sum"


Placement = Replicate | Shard | StridedShard | Partial


class Sharding(msgspec.Struct, frozen=True):
    """How a tensor lies on a mesh: one placement per axis. `order` names the axes in the order in which they cut;
    empty means the mesh's own, which is DTensor's.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.order:
            msgspec.structs.force_setattr(self, "order", self.mesh.axes)
        if len(self.placements) != len(self.mesh.axes) or sorted(self.order) != sorted(self.mesh.axes):
            raise ConfigError(
                f"placements {self.placements} in order {self.order} do not suit the mesh axes {self.mesh.axes}",
                hint="give one placement per axis, and every axis once",
            )

    def nested(self) -> Sharding:
        """The same with strided shards as what they stand for: cuts of what the axes to their right have left.

        torch's `fully_shard` cuts like this, whatever its placements say. On an uneven dim some ranks then hold other
        rows than the placements give them (9 rows on dp 4 x tp 2), so a reader must know who has cut a tensor.
        """
        strided = [axis for axis, p in zip(self.mesh.axes, self.placements, strict=True) if isinstance(p, StridedShard)]
        placements: list[Placement] = []
        for axis, p in enumerate(self.placements):
            if isinstance(p, StridedShard):
                inner = (s for s, q in enumerate(self.placements) if s > axis and isinstance(q, Shard | StridedShard))
                sizes = [self.mesh.shape[s] for s in inner if _dim(self.placements[s]) == p.dim]
                if math.prod(sizes) != p.split_factor:
                    raise ConfigError(
                        f"{p} on mesh axis '{self.mesh.axes[axis]}' does not stand for a cut inside the axes to its "
                        f"right, which cut dim {p.dim} into {math.prod(sizes)}"
                    )
            placements.append(Shard(p.dim) if isinstance(p, StridedShard) else p)
        order = [axis for axis in self.order if axis not in strided] + strided[::-1]
        return Sharding(self.mesh, tuple(placements), tuple(order))


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """A region of a tensor, and the index of its first element in the local tensor of its holder."""

    region: Region
    start: tuple[int, ...]


def cuts(name: str, shape: Sequence[int], sharding: Sharding, rank: int) -> tuple[Cut, ...]:
    """The regions of tensor `name` that a rank holds, in local order; none for an empty shard.

    Agrees with `torch.distributed.tensor` element by element. Raises `ManifestMismatch` for a Partial placement.
    """
    return _cuts(_runs(name, shape, sharding, rank))


def local_shape(name: str, shape: Sequence[int], sharding: Sharding, rank: int) -> tuple[int, ...]:
    """The shape of the rank's local tensor."""
    return tuple(sum(extent for _, extent in runs) for runs in _runs(name, shape, sharding, rank))


def is_same_everywhere(name: str, shape: Sequence[int], one: Sharding, other: Sharding) -> bool:
    """Whether two shardings on one mesh give every rank the same. Tells whether `nested` matters for a shape."""
    return all(_runs(name, shape, one, rank) == _runs(name, shape, other, rank) for rank in one.mesh.ranks)


def agreed_shape(name: str, claims: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """The global shape that every rank claims for a tensor; raises `ManifestMismatch` naming who claims what."""
    ranks_of: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, shape in claims.items():
        ranks_of[tuple(shape)].append(rank)
    if len(ranks_of) != 1:
        said = ", ".join(f"{list(shape)} by ranks {ranks}" for shape, ranks in ranks_of.items())
        raise ManifestMismatch(
            f"the global shape of '{name}' is not agreed: {said or 'nobody claims one'}",
            hint="pass shape= when a DTensor is made of uneven local tensors",
        )
    return next(iter(ranks_of))


def global_shape(name: str, local_shapes: Mapping[int, Sequence[int]], sharding: Sharding) -> tuple[int, ...]:
    """The one global shape that explains the local shapes of all ranks of the mesh; raises `ManifestMismatch`."""
    mesh = sharding.mesh
    if set(local_shapes) != set(mesh.ranks):
        raise ManifestMismatch(f"the local shapes of '{name}' are of ranks {sorted(local_shapes)}, not of all the mesh")
    shape = [0] * len(local_shapes[mesh.ranks[0]])
    for rank, local in local_shapes.items():
        place = mesh.coordinate(rank)
        for dim in range(len(shape)):
            # Along axes that do not cut this dim all ranks have the same: one of them counts.
            if all(at == 0 or _dim(p) == dim for at, p in zip(place, sharding.placements, strict=True)):
                shape[dim] += local[dim]
    wrong = {r: list(s) for r, s in local_shapes.items() if tuple(s) != local_shape(name, shape, sharding, r)}
    if wrong:
        raise ManifestMismatch(
            f"no global shape explains the local shapes of '{name}': with {shape} those of ranks {wrong} are wrong",
            hint="shards of a dim have the same rounded-up size; only the last ones may be smaller",
        )
    return tuple(shape)


def flat_range(shape: Sequence[int], start: int, stop: int) -> tuple[Cut, ...]:
    """The elements [start, stop) of a tensor flattened in row-major order as boxes; what lies beyond its end is none.

    `Cut.start` is 1-d: the index within the range. In the local, dim d of a box has the stride `row_strides(shape)[d]`.
    """
    stop = min(stop, math.prod(shape))
    found: list[Cut] = []
    position = start
    strides = row_strides(shape)
    while position < stop:
        # The largest box that begins here: whole rows of the outermost dim whose row begins here and ends in time.
        dim = next(
            (d for d, stride in enumerate(strides) if position % stride == 0 and position + stride <= stop), len(shape)
        )
        index = [position // stride % size for stride, size in zip(strides, shape, strict=True)]
        extent = [1] * dim + list(shape[dim:])
        if dim < len(shape):
            extent[dim] = min((stop - position) // strides[dim], shape[dim] - index[dim])
        found.append(Cut(Region(tuple(index), tuple(extent)), (position - start,)))
        position += math.prod(extent)
    return tuple(found)


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a row-major tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


class OwnerMap(msgspec.Struct, frozen=True):
    """Which rank has which of `count` experts (of expert parallelism) or layers (of pipeline stages).

    `owned[rank]` lists them in the order of the rank's slots. Something may be owned several times (replicas), and
    ranks may own different numbers; nothing may be owned by nobody. Another version may have another map.
    """

    count: int
    owned: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        there = {item for items in self.owned for item in items}
        strange = sorted(there - set(range(self.count)))
        lost = sorted(set(range(self.count)) - there)
        if strange or lost:
            raise ConfigError(
                f"a map of {self.count} on {len(self.owned)} ranks names {strange} and leaves out {lost}",
                hint="give every expert (or layer) to at least one rank",
            )

    @classmethod
    def linear(cls, count: int, num_ranks: int) -> OwnerMap:
        """Neighbours stay together; when `num_ranks` does not divide `count`, the first ranks have one more."""
        least, more = divmod(count, num_ranks)
        return cls.of_counts([least + (rank < more) for rank in range(num_ranks)])

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> OwnerMap:
        """Neighbours stay together, `counts[rank]` of them at each rank."""
        ends = list(itertools.accumulate(counts))
        return cls(sum(counts), tuple(tuple(range(end - n, end)) for end, n in zip(ends, counts, strict=True)))

    @classmethod
    def round_robin(cls, count: int, num_ranks: int) -> OwnerMap:
        return cls(count, tuple(tuple(range(rank, count, num_ranks)) for rank in range(num_ranks)))

    def ranks_of(self, item: int) -> tuple[int, ...]:
        """Who has it; several when there are replicas."""
        return tuple(rank for rank, items in enumerate(self.owned) if item in items)


Runs = tuple[tuple[int, int], ...]
"""What a rank holds along one dim: (offset, extent) in the tensor, in local order, never adjacent."""


def _dim(placement: Placement) -> int | None:
    return placement.dim if isinstance(placement, Shard | StridedShard) else None


def _runs(name: str, shape: Sequence[int], sharding: Sharding, rank: int) -> tuple[Runs, ...]:
    mesh = sharding.mesh
    place = mesh.coordinate(rank)
    steps: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for axis in map(mesh.axes.index, sharding.order):
        placement = sharding.placements[axis]
        if isinstance(placement, Partial):
            raise ManifestMismatch(
                f"'{name}' is Partial({placement.reduce_op}) on mesh axis '{mesh.axes[axis]}': a rank holds an operand "
                "of the reduction, not the value",
                hint="redistribute it to Replicate() or Shard(dim) first",
            )
        if isinstance(placement, Replicate):
            continue
        if not 0 <= placement.dim < len(shape):
            raise ManifestMismatch(f"'{name}' {list(shape)} has no dim {placement.dim} to cut on '{mesh.axes[axis]}'")
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        steps[placement.dim].append((mesh.shape[axis], place[axis], factor))
    return tuple(_runs_of_dim(extent, tuple(done)) for extent, done in zip(shape, steps, strict=True))


@functools.lru_cache(maxsize=4096)  # layers are alike: the same few dims, again and again
def _runs_of_dim(extent: int, steps: tuple[tuple[int, int, int], ...]) -> Runs:
    """Cut a dim step by step; a step is (number of shards, index of ours, split factor)."""
    runs: Runs = ((0, extent),) if extent else ()
    for num, index, factor in steps:
        total = sum(n for _, n in runs)
        outer = -(-total // factor)
        kept: list[tuple[int, int]] = []
        for begin in range(0, total, outer or 1):
            size = min(outer, total - begin)
            inner = -(-size // num)
            kept += _window(runs, begin + min(size, inner * index), begin + min(size, inner * (index + 1)))
        runs = _merged(kept)
    return runs


def _window(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The elements [start, stop) of the runs laid end to end."""
    found = []
    position = 0
    for offset, extent in runs:
        low, high = max(start - position, 0), min(stop - position, extent)
        if low < high:
            found.append((offset + low, high - low))
        position += extent
    return found


def _merged(runs: list[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for offset, extent in runs:
        if merged and sum(merged[-1]) == offset:
            merged[-1] = (merged[-1][0], merged[-1][1] + extent)
        else:
            merged.append((offset, extent))
    return tuple(merged)


def _cuts(runs_of_dims: tuple[Runs, ...]) -> tuple[Cut, ...]:
    placed = []
    for runs in runs_of_dims:
        starts = itertools.accumulate((extent for _, extent in runs), initial=0)
        placed.append([(offset, extent, start) for (offset, extent), start in zip(runs, starts, strict=False)])
    return tuple(
        Cut(Region(tuple(p[0] for p in box), tuple(p[1] for p in box)), tuple(p[2] for p in box))
        for box in itertools.product(*placed)
    )
