"""Random layouts of both sides: how tensors are cut, and how a member lays its boxes out in its memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from random import Random

from wsync.holding import Holding, HoldingBuilder, Region
from wsync.manifest import TensorSpec

SHAPES = ((), (1,), (5,), (8,), (0,), (3, 0), (1, 7), (4, 6), (5, 3), (6, 6), (2, 3, 4), (3, 1, 5), (2, 2, 2, 3))
DTYPES = ("uint8", "int16", "float16", "float32", "int64")
WIDER = {"float16": "float32", "float32": "float64"}
"""Local dtypes of a trainer that casts."""

Part = tuple[str, Region]
"""A box of a tensor, by the name that its owner has for it."""


def tensors(random: Random, count: int) -> list[TensorSpec]:
    """Some tensors of a trainer, now and then two of them tied."""
    specs = [TensorSpec(f"t{i}", random.choice(DTYPES), random.choice(SHAPES)) for i in range(count)]
    if random.random() < 0.3:
        root = random.choice(specs)
        specs.append(TensorSpec("tied", root.dtype, root.shape, root.name))
    return specs


def tiles(random: Random, shape: Sequence[int]) -> list[Region]:
    """Boxes that cover a tensor, each element once: whole, cut at random in every dim, or as flat ranges."""
    kind = random.choice(("whole", "cut", "cut", "flat"))
    if kind == "whole" or not shape or not math.prod(shape):
        return [Region.whole(shape)]
    if kind == "flat":
        size = math.prod(shape)
        cuts = [0, *sorted(random.sample(range(1, size), min(size - 1, random.randint(0, 3)))), size]
        return [box for a, b in itertools.pairwise(cuts) for box in flat_range(shape, a, b)]
    edges = [[0, *sorted(random.sample(range(1, n), min(n - 1, random.choice((0, 1, 1, 2))))), n] for n in shape]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [Region(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


def flat_range(shape: Sequence[int], begin: int, end: int) -> Iterator[Region]:
    """The elements [begin, end) of the flattened tensor, as boxes."""
    if not shape:
        yield Region((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        for box in flat_range(shape[1:], begin - last * row, end - last * row):
            yield Region((last, *box.offset), (1, *box.extent))
        return
    if begin < first * row:
        for box in flat_range(shape[1:], begin - (first - 1) * row, row):
            yield Region((first - 1, *box.offset), (1, *box.extent))
    if first < last:
        yield Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < end:
        for box in flat_range(shape[1:], 0, end - last * row):
            yield Region((last, *box.offset), (1, *box.extent))


def deal(random: Random, specs: Sequence[TensorSpec], num_ranks: int) -> list[list[Part]]:
    """Who holds what: together the ranks have every tensor, some parts of it more than once."""
    parts: list[list[Part]] = [[] for _ in range(num_ranks)]
    for spec in specs:
        if spec.alias_of:
            continue
        names = [spec.name, *(s.name for s in specs if s.alias_of == spec.name)]
        for _ in range(random.choice((1, 1, 1, 2))):
            for tile in tiles(random, spec.shape):
                for rank in random.sample(range(num_ranks), random.choice((1, 1, min(2, num_ranks)))):
                    parts[rank].append((random.choice(names), tile))
    return parts


def want(random: Random, specs: Sequence[TensorSpec]) -> list[Part]:
    """What one worker wants: of each tensor all or some tiles of a cut of its own, some of them in two places."""
    parts: list[Part] = []
    for spec in specs:
        if random.random() < 0.2:
            continue
        own = tiles(random, spec.shape)
        if random.random() < 0.4:
            own = random.sample(own, random.randint(1, len(own)))
        for tile in own:
            parts += [(spec.name, tile)] * random.choice((1, 1, 1, 2))
        if random.random() < 0.2:
            parts += [(spec.name, tile) for tile in tiles(random, spec.shape)]
    return parts


def lay_out(random: Random, specs: Sequence[TensorSpec], parts: Sequence[Part], *, casts: bool = False) -> Holding:
    """A holding of these parts: each in a local of its own, or several stacked, interleaved or flattened into one."""
    builder = HoldingBuilder()
    by_name = {spec.name: spec for spec in specs}
    for spec in specs:
        builder.tensor(spec.name, spec.dtype, spec.shape, spec.alias_of)
    numbers = itertools.count()
    left = list(parts)
    random.shuffle(left)
    while left:
        name, region = left.pop()
        dtype = by_name[name].dtype
        if casts and random.random() < 0.3:
            dtype = WIDER.get(dtype, dtype)
        same = [part for part in left if by_name[part[0]].dtype == by_name[name].dtype]
        equal = [part for part in same if part[1].extent == region.extent]
        kind = random.choice(("alone", "alone", "flat", "stacked", "interleaved"))
        others: list[Part] = []
        if kind in ("stacked", "interleaved") and region.extent:
            others = equal[: random.randint(0, 2)]
        elif kind == "flat":
            others = same[: random.randint(0, 3)]
        else:
            kind = "alone"
        for other in others:
            left.remove(other)
        local = f"l{next(numbers)}"
        put = {"alone": _alone, "flat": _flat, "stacked": _stacked, "interleaved": _interleaved}[kind]
        put(random, builder, local, dtype, [(name, region), *others])
    return builder.build()


def _alone(random: Random, builder: HoldingBuilder, local: str, dtype: str, parts: Sequence[Part]) -> None:
    """Its dims in any order, perhaps with a stride and its gaps, perhaps a pad at the end of every dim."""
    ((name, region),) = parts
    order = random.sample(range(len(region.extent)), len(region.extent))
    step = random.choice((1, 1, 1, 2))
    pads = [random.choice((0, 0, 1)) for _ in order]
    shape = [region.extent[d] * (step if i == 0 else 1) + pads[i] for i, d in enumerate(order)]
    padding: list[Region] = []
    for i, d in enumerate(order):
        whole = [0] * len(shape), list(shape)
        if pads[i]:
            whole[0][i], whole[1][i] = shape[i] - 1, 1
            padding.append(Region(tuple(whole[0]), tuple(whole[1])))
        if i == 0 and step == 2:
            for row in range(region.extent[d]):
                whole[0][i], whole[1][i] = 2 * row + 1, 1
                padding.append(Region(tuple(whole[0]), tuple(whole[1])))
    builder.local(local, dtype, shape, padding)
    dims = [order.index(d) for d in range(len(order))]
    builder.piece(name, region, local, (0,) * len(shape), dims, [step if dim == 0 else 1 for dim in dims])


def _flat(random: Random, builder: HoldingBuilder, local: str, dtype: str, parts: Sequence[Part]) -> None:
    """One after another in one dim, each flattened in any order of its dims, with gaps between them."""
    padding: list[Region] = []
    placed: list[tuple[str, Region, int, list[int]]] = []
    end = 0
    for name, region in parts:
        if gap := random.choice((0, 0, 2)):
            padding.append(Region((end,), (gap,)))
            end += gap
        order = random.sample(range(len(region.extent)), len(region.extent))
        steps = [1] * len(order)
        for i in range(len(order) - 2, -1, -1):
            steps[order[i]] = max(1, steps[order[i + 1]] * region.extent[order[i + 1]])
        placed.append((name, region, end, steps))
        end += region.numel
    builder.local(local, dtype, (end,), padding)
    for name, region, start, steps in placed:
        builder.piece(name, region, local, (min(start, max(end - 1, 0)),), (0,) * len(steps), steps)


def _stacked(random: Random, builder: HoldingBuilder, local: str, dtype: str, parts: Sequence[Part]) -> None:
    extent = parts[0][1].extent
    builder.local(local, dtype, (len(parts), *extent))
    for index, (name, region) in enumerate(parts):
        dims = [d + 1 for d in range(len(extent))]
        builder.piece(name, region, local, (index, *(0 for _ in extent)), dims, [1] * len(extent))


def _interleaved(random: Random, builder: HoldingBuilder, local: str, dtype: str, parts: Sequence[Part]) -> None:
    extent = parts[0][1].extent
    builder.local(local, dtype, (extent[0] * len(parts), *extent[1:]))
    for index, (name, region) in enumerate(parts):
        start, steps = (index, *(0 for _ in extent[1:])), (len(parts), *(1 for _ in extent[1:]))
        builder.piece(name, region, local, start, None, steps)


def names_of_worker(random: Random, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The trainer's tensors as a worker may name them: tied or not, or tied to a name that the trainer has not."""
    own: list[TensorSpec] = []
    for spec in specs:
        if spec.alias_of:
            own.append(spec if random.random() < 0.5 else TensorSpec(spec.name, spec.dtype, spec.shape))
        elif random.random() < 0.1 and not any(other.alias_of == spec.name for other in specs):
            own.append(TensorSpec(f"own.{spec.name}", spec.dtype, spec.shape))
            own.append(TensorSpec(spec.name, spec.dtype, spec.shape, f"own.{spec.name}"))
        else:
            own.append(spec)
    return own
