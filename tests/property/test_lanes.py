"""Any two layouts: what the planned lanes carry is, byte for byte, what an oracle finds that knows no plan.

`WSYNC_EXAMPLES` says how many layouts are tried (200 if it is not set).
"""

from __future__ import annotations

import itertools
import os
from random import Random

import msgspec
import numpy as np
import oracle
import pytest
from _layouts import deal, lay_out, names_of_worker, tensors, want
from hypothesis import given, note, settings
from hypothesis import strategies as st

from wsync.engine.lanes import Bundle, Locator, ShardLane, ShardPlan, plan_lanes, prove
from wsync.engine.overlap import check_wanted
from wsync.engine.verify import Cuts, DigestReport, common_cuts, compare, digest_report
from wsync.errors import ManifestMismatch, PlanError
from wsync.holding import Holding, HoldingBuilder, Piece, Place, Region
from wsync.manifest import ITEMSIZE

EXAMPLES = int(os.environ.get("WSYNC_EXAMPLES", "200"))
SEEDS = st.integers(0, 2**32 - 1)
FILL = 0xAB


class Case:
    """Both sides, their memory, and the trainer's ties."""

    def __init__(self, random: Random, num_tensors: int, num_ranks: int, num_workers: int) -> None:
        specs = tensors(random, num_tensors)
        self.ties = {spec.name: spec.alias_of for spec in specs if spec.alias_of}
        self.held = {
            rank: lay_out(random, specs, parts, casts=True) for rank, parts in enumerate(deal(random, specs, num_ranks))
        }
        workers = [names_of_worker(random, specs) for _ in range(num_workers)]
        holdings = [lay_out(random, names, want(random, names)) for names in workers]
        self.wanted = {holding.digest(): holding for holding in holdings}
        self.memory = {rank: memory_of(holding) for rank, holding in self.held.items()}
        for rank, holding in self.held.items():
            for piece in holding.pieces:
                tensor = oracle.payload(holding, piece)
                shape = holding.tensors[piece.tensor].shape
                memory = self.memory[rank][piece.place.local]
                for index, local in oracle.elements(piece):
                    memory[local] = value(int(tensor[1:]), index, shape, is_float=memory.dtype.kind == "f")


def value(tensor: int, index: tuple[int, ...], shape: tuple[int, ...], *, is_float: bool) -> float:
    """Of its own for every element of a tensor, and in floats one that a cast has to round."""
    number = int(np.ravel_multi_index(index, shape)) if shape else 0
    return (7 + number + 131 * tensor) % 251 + (0.1 if is_float else 0)


def memory_of(holding: Holding) -> list[np.ndarray]:
    """A holding's locals, full of bytes that are nobody's."""
    return [
        np.full(int(np.prod(local.shape)) * ITEMSIZE[local.dtype], FILL, np.uint8)
        .view(local.dtype)
        .reshape(local.shape)
        for local in holding.locals
    ]


def view(memory: list[np.ndarray], place: Place, extent: tuple[int, ...]) -> np.ndarray:
    array = memory[place.local]
    offset, strides = place.strided(array.strides)
    return np.ndarray(extent, array.dtype, array, offset, strides)


def run(plan: ShardPlan, case: Case) -> dict[str, list[np.ndarray]]:
    """Pack every lane on its source and install it into all its receivers. Returns the receivers' memory."""
    received = {digest: memory_of(holding) for digest, holding in case.wanted.items()}
    receivers = {digest: Locator(holding) for digest, holding in case.wanted.items()}
    sources = {rank: Locator(holding) for rank, holding in case.held.items()}
    for lane in plan.lanes:
        packed = [
            view(case.memory[lane.source], places[0], extent).astype(spec.dtype)
            for (places, extent), spec in zip(sources[lane.source].views(lane), lane.manifest.tensors, strict=True)
        ]
        assert [array.nbytes for array in packed] == [spec.nbytes for spec in lane.manifest.tensors]
        assert sum(array.nbytes for array in packed) == lane.nbytes
        for digest in lane.receivers:
            for (places, extent), array in zip(receivers[digest].views(lane), packed, strict=True):
                for place in places:
                    view(received[digest], place, extent)[...] = array
    return received


def needed(case: Case, digests: list[str]) -> int:
    """Bytes of all elements that at least one of these wants, each once."""
    elements: dict[tuple[str, tuple[int, ...]], int] = {}
    for digest in digests:
        holding = case.wanted[digest]
        own = {spec.alias_of: spec.name for spec in holding.tensors if spec.alias_of.startswith("own.")}
        for piece in holding.pieces:
            name = oracle.payload(holding, piece)
            name = own.get(name, name)
            for index, _ in oracle.elements(piece):
                elements[case.ties.get(name, name), index] = ITEMSIZE[holding.tensors[piece.tensor].dtype]
    return sum(elements.values())


def report(holding: Holding, memory: list[np.ndarray], cuts: Cuts) -> DigestReport:
    named = {local.name: array for local, array in zip(holding.locals, memory, strict=True)}
    return digest_report(holding, named, cuts=cuts)


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4))
def test_verify_sees_one_changed_element_and_nothing_else(seed: int, num_tensors: int, num_ranks: int) -> None:
    random = Random(seed)
    case = Case(random, num_tensors, num_ranks, 1)
    received = run(plan_lanes(case.held, case.wanted), case)
    ((digest, holding),) = case.wanted.items()
    cuts = common_cuts([*case.held.values(), holding])
    ours = [report(held, case.memory[rank], cuts) for rank, held in case.held.items()]
    found = compare(ours, [report(holding, received[digest], cuts)])
    assert not [difference for difference in found if "differ" in difference.problem]
    pieces = [piece for piece in holding.pieces if piece.region.numel]
    if not pieces:
        return
    piece = random.choice(pieces)
    at = tuple(map(random.randrange, piece.region.extent))
    changed = view(received[digest], piece.place, piece.region.extent)
    flat = np.frombuffer(changed[at].tobytes(), np.uint8).copy()
    flat[random.randrange(len(flat))] ^= 1 << random.randrange(8)
    changed[at] = flat.view(changed.dtype)[0]
    names = {difference.tensor for difference in compare(ours, [report(holding, received[digest], cuts)])}
    spec = holding.tensors[piece.tensor]
    assert spec.name in names


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_any_two_layouts_move_the_right_bytes(seed: int, num_tensors: int, num_ranks: int, num_workers: int) -> None:
    case = Case(Random(seed), num_tensors, num_ranks, num_workers)
    for holding in case.wanted.values():
        check_wanted(holding)
    plan = plan_lanes(case.held, case.wanted)
    received = run(plan, case)
    dtypes = {spec.dtype: np.dtype(spec.dtype) for holding in case.held.values() for spec in holding.tensors}
    wholes = oracle.gather(case.held, case.memory, dtypes)
    for digest, holding in case.wanted.items():
        right = memory_of(holding)
        oracle.fill(holding, right, wholes, case.ties)
        for local, got, expected in zip(holding.locals, received[digest], right, strict=True):
            assert got.tobytes() == expected.tobytes(), local.name
        assert sum(lane.nbytes for lane in plan.of_receiver(digest)) == needed(case, [digest])
    assert plan.nbytes == needed(case, list(case.wanted)), "nothing is sent twice"
    assert sum(lane.nbytes for rank in case.held for lane in plan.of_source(rank)) == plan.nbytes


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.integers(1, 3), st.integers(1, 3))
def test_the_plan_does_not_depend_on_the_order_of_anything(seed: int, num_tensors: int, num_ranks: int) -> None:
    case = Case(Random(seed), num_tensors, num_ranks, 2)
    random = Random(seed)
    held = {rank: shuffled(random, case.held[rank]) for rank in random.sample(range(num_ranks), num_ranks)}
    wanted = {
        digest: shuffled(random, case.wanted[digest]) for digest in random.sample(sorted(case.wanted), len(case.wanted))
    }
    assert plan_lanes(held, wanted) == plan_lanes(case.held, case.wanted)


def shuffled(random: Random, holding: Holding) -> Holding:
    """The same holding with its tensors, locals and pieces in another order."""
    tensors = random.sample(range(len(holding.tensors)), len(holding.tensors))
    pieces = [
        msgspec.structs.replace(piece, tensor=tensors.index(piece.tensor))
        for piece in random.sample(holding.pieces, len(holding.pieces))
    ]
    return Holding(tuple(holding.tensors[i] for i in tensors), holding.locals, tuple(pieces))


@settings(max_examples=EXAMPLES)
@given(SEEDS, st.integers(0, 2**16))
def test_a_damaged_plan_is_refused(seed: int, choice: int) -> None:
    case = Case(Random(seed), 2, 3, 2)
    plan = plan_lanes(case.held, case.wanted)
    prove(plan, case.held, case.wanted)
    damaged = damages(case, plan)
    if damaged:
        name, lanes = damaged[choice % len(damaged)]
        note(name)
        with pytest.raises(PlanError):
            prove(msgspec.structs.replace(plan, lanes=lanes), case.held, case.wanted)


def damages(case: Case, plan: ShardPlan) -> list[tuple[str, tuple[ShardLane, ...]]]:
    """(what was done, the lanes afterwards): every way to damage every bundle of every lane."""
    found: list[tuple[str, tuple[ShardLane, ...]]] = []

    def other(name: str, index: int, *lanes: ShardLane) -> None:
        found.append((name, (*plan.lanes[:index], *lanes, *plan.lanes[index + 1 :])))

    replace = msgspec.structs.replace
    for index, lane in enumerate(plan.lanes):
        other("a lane dropped", index)
        other("a lane doubled", index, lane, lane)
        other("a receiver lost", index, replace(lane, receivers=lane.receivers[1:]))
        other("a stranger as receiver", index, replace(lane, receivers=(*lane.receivers, "stranger")))
        other("a source that is not there", index, replace(lane, source=99))
        for rank, holding in case.held.items():
            if any(not has(holding, bundle, tensor) for bundle in lane.bundles for tensor in bundle.tensors):
                other("a source that lacks something", index, replace(lane, source=rank))
        for number, bundle in enumerate(lane.bundles):
            rest = lane.bundles[:number], lane.bundles[number + 1 :]

            def with_bundles(
                name: str,
                *bundles: Bundle,
                lane: ShardLane = lane,
                index: int = index,
                rest: tuple[tuple[Bundle, ...], tuple[Bundle, ...]] = rest,
            ) -> None:
                other(name, index, replace(lane, bundles=(*rest[0], *bundles, *rest[1])))

            with_bundles("a fragment dropped", replace(bundle, tensors=bundle.tensors[1:]))
            with_bundles("a fragment doubled", replace(bundle, tensors=(bundle.tensors[0], *bundle.tensors)))
            with_bundles("a bundle doubled", bundle, bundle)
            with_bundles("another dtype", replace(bundle, dtype="complex64"))
            with_bundles("an unknown tensor", replace(bundle, tensors=("unknown", *bundle.tensors)))
            for dim, size in enumerate(bundle.region.extent):
                offset, extent = list(bundle.region.offset), list(bundle.region.extent)
                offset[dim] += 1
                with_bundles("a fragment shifted", replace(bundle, region=Region(tuple(offset), tuple(extent))))
                if size > 1:
                    extent[dim] -= 1
                    with_bundles(
                        "a fragment cut short", replace(bundle, region=Region(bundle.region.offset, tuple(extent)))
                    )
    return found


def has(holding: Holding, bundle: Bundle, tensor: str) -> bool:
    """Whether one piece of the holding has the bundle's region of a tensor."""
    return any(
        oracle.payload(holding, piece) == tensor and piece.region.contains(bundle.region) for piece in holding.pieces
    )


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_a_hole_is_named(seed: int) -> None:
    """One element is taken from everybody who has it: planning names the tensor, or nobody wanted the element."""
    random = Random(seed)
    case = Case(random, 2, 2, 2)
    victims = [(h, piece) for h in case.held.values() for piece in h.pieces if piece.region.numel]
    if not victims:
        return
    holding, victim = random.choice(victims)
    name = oracle.payload(holding, victim)
    lost = next(oracle.elements(victim))[0]

    def keeps(holding: Holding, piece: Piece) -> bool:
        return oracle.payload(holding, piece) != name or lost not in [index for index, _ in oracle.elements(piece)]

    held = {
        rank: Holding(h.tensors, h.locals, tuple(piece for piece in h.pieces if keeps(h, piece)))
        for rank, h in case.held.items()
    }
    left = {
        index
        for h in held.values()
        for p in h.pieces
        if oracle.payload(h, p) == name
        for index, _ in oracle.elements(p)
    }
    asked = {
        index
        for h in case.wanted.values()
        for p in h.pieces
        if case.ties.get(n := oracle.payload(h, p), n).removeprefix("own.") == name
        for index, _ in oracle.elements(p)
    }
    if asked <= left:
        plan_lanes(held, case.wanted)
    else:
        with pytest.raises(PlanError, match=f"'{name}'"):
            plan_lanes(held, case.wanted)


@settings(max_examples=EXAMPLES)
@given(SEEDS)
def test_check_wanted_is_as_exact_as_a_mask(seed: int) -> None:
    """A good holding that was damaged a little, or places at random: refused just when a count of writes says so."""
    random = Random(seed)
    holding = damaged(random) if random.random() < 0.7 else scattered(random)
    if oracle.is_written_once(holding):
        check_wanted(holding)
    else:
        with pytest.raises(ManifestMismatch, match=r"'l\d+'"):
            check_wanted(holding)


def damaged(random: Random) -> Holding:
    specs = tensors(random, 2)
    holding = lay_out(random, specs, want(random, specs))
    locals_, pieces = list(holding.locals), list(holding.pieces)
    kind = random.randrange(4)
    if kind == 0 and pieces:
        pieces.pop(random.randrange(len(pieces)))
    elif kind == 1 and pieces:
        pieces.append(random.choice(pieces))
    elif kind == 2 and locals_:
        index = random.randrange(len(locals_))
        locals_[index] = msgspec.structs.replace(locals_[index], padding=locals_[index].padding[1:])
    elif kind == 3 and locals_:
        index = random.randrange(len(locals_))
        shape = locals_[index].shape
        box = Region((0,) * len(shape), tuple(min(1, extent) for extent in shape))
        locals_[index] = msgspec.structs.replace(locals_[index], padding=(*locals_[index].padding, box))
    return Holding(holding.tensors, tuple(locals_), tuple(pieces))


def scattered(random: Random) -> Holding:
    """A small local, and places with any steps and dims in it."""
    shape = random.choice(((4,), (6,), (8,), (12,), (2, 2), (3, 4), (2, 6)))
    builder = HoldingBuilder()
    builder.local("l0", "int16", shape)
    places = list(itertools.product(*(range(n) for n in shape)))
    for number in range(random.randint(1, 3)):
        extent = tuple(random.choice((1, 2, 2, 3)) for _ in range(random.randint(1, 3)))
        start = random.choice(places)
        dims = [random.randrange(len(shape)) for _ in extent]
        steps = [random.choice((1, 1, 2, 3, 4)) for _ in extent]
        last = list(start)
        for n, dim, step in zip(extent, dims, steps, strict=True):
            last[dim] += (n - 1) * step
        if all(i < n for i, n in zip(last, shape, strict=True)):
            builder.tensor(f"t{number}", "int16", extent)
            builder.piece(f"t{number}", Region.whole(extent), "l0", start, dims, steps)
    return builder.build()
