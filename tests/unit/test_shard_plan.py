"""Lanes between two sides that hold shards: what is agreed before a byte moves, who sends what, and to where."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from benchmarks._big_model import Size, tensors_of, trainer, worker
from wsync.engine.lanes import Bundle, Fragment, LanePlanner, Locator, ShardLane, ShardPlan, plan_lanes, prove
from wsync.engine.overlap import check_wanted
from wsync.errors import ManifestMismatch, PlanError
from wsync.holding import Holding, HoldingBuilder, Place, Region
from wsync.manifest import ITEMSIZE, TensorSpec

Tensors = Sequence[tuple[str, tuple[int, ...]]]


def rows(tensors: Tensors, begin: float = 0, end: float = 1, *, dtype: str = "float32", local: str = "") -> Holding:
    """Of every tensor the rows from one share of it to another, each in a local of its own name."""
    builder = HoldingBuilder()
    for name, shape in tensors:
        a, b = round(begin * shape[0]), round(end * shape[0])
        builder.tensor(name, dtype, shape)
        builder.local(name, local or dtype, (b - a, *shape[1:]))
        zeros = (0,) * len(shape)
        builder.piece(name, Region((a, *zeros[1:]), (b - a, *shape[1:])), name, zeros)
    return builder.build()


def with_tie(holding: Holding, name: str, root: str) -> Holding:
    spec = next(spec for spec in holding.tensors if spec.name == root)
    return msgspec.structs.replace(holding, tensors=(*holding.tensors, TensorSpec(name, spec.dtype, spec.shape, root)))


def by_digest(*holdings: Holding) -> dict[str, Holding]:
    return {holding.digest(): holding for holding in holdings}


def shares(tensors: Tensors, count: int) -> list[Holding]:
    return [rows(tensors, i / count, (i + 1) / count) for i in range(count)]


def egress(plan: ShardPlan, ranks: int) -> list[int]:
    return [sum(lane.nbytes for lane in plan.of_source(rank)) for rank in range(ranks)]


def refused(held: Mapping[int, Holding], *wanted: Holding, error: type[Exception] = ManifestMismatch) -> str:
    with pytest.raises(error) as raised:
        plan_lanes(held, by_digest(*wanted))
    return str(raised.value)


def test_case_D07_what_moves_is_what_is_needed() -> None:
    """Eight sources of three rows, three receivers of eight: no byte more than the tensor has."""
    tensors = [("w", (24, 1024))]
    wanted = shares(tensors, 3)
    plan = plan_lanes(dict(enumerate(shares(tensors, 8))), by_digest(*wanted))
    assert plan.nbytes == 24 * 1024 * 4
    for holding in wanted:
        lanes = plan.of_receiver(holding.digest())
        assert sum(lane.nbytes for lane in lanes) == holding.nbytes == 8 * 1024 * 4
        assert len(lanes) == {0: 3, 8: 4, 16: 3}[holding.pieces[0].region.offset[0]]
    assert egress(plan, 8) == [3 * 1024 * 4] * 8


def test_case_D02_names_are_matched_in_linear_time_and_once() -> None:
    """22,213 names on both sides: planned in under a second, and the second time not at all."""
    tensors = [(f"model.layers.{i // 384}.experts.{i % 384}.weight", (4, 2)) for i in range(22_213)]
    held, wanted = dict(enumerate(shares(tensors, 2))), by_digest(rows(tensors))
    planner = LanePlanner()
    start = time.process_time()
    plan = planner.plan(held, wanted)
    assert time.process_time() - start < 1
    assert sum(len(lane.fragments) for lane in plan.lanes) == 2 * 22_213
    start = time.process_time()
    assert planner.plan(dict(held), dict(wanted)) is plan
    assert time.process_time() - start < 0.01
    assert planner.plan(held, by_digest(rows(tensors, 0, 0.5))) is not plan


def test_an_equal_holding_in_another_s_place_changes_nothing() -> None:
    tensors = [("a", (8, 2)), ("b", (4, 4))]
    held, wanted = dict(enumerate(shares(tensors, 2))), by_digest(rows(tensors))
    planner = LanePlanner()
    plan = planner.plan(held, wanted)
    assert planner.plan(held | {1: shares(tensors, 2)[1]}, wanted) is plan
    moved = planner.plan({0: held[1], 1: held[0]}, wanted)
    assert moved == plan_lanes({0: held[1], 1: held[0]}, wanted)
    assert moved != plan


def test_a_planner_forgets_names_when_the_trainer_s_ties_change() -> None:
    """The receiver's 'head' is the trainer's 'embed' as long as the trainer ties them."""
    both = [("embed", (4, 2)), ("head", (4, 2))]
    planner, wanted = LanePlanner(), by_digest(rows(both))
    assert planner.plan({0: with_tie(rows(both[:1]), "head", "embed")}, wanted).nbytes == 32
    assert planner.plan({0: rows(both)}, wanted).nbytes == 64


@pytest.mark.parametrize("wanted_dim", [5, 6])
def test_case_A36_global_shapes_must_agree(wanted_dim: int) -> None:
    """Rows 3 and 2 of a tensor of 5: ranks that infer 6 and 4 are refused, and so is a side that says another size."""

    def rank(offset: int, extent: int, size: int) -> Holding:
        builder = HoldingBuilder()
        builder.tensor("w", "float32", (size,))
        builder.local("w", "float32", (extent,))
        builder.piece("w", Region((min(offset, size - extent),), (extent,)), "w", (0,))
        return builder.build()

    wanted = rows([("w", (wanted_dim,))])
    text = refused({0: rank(0, 3, 6), 1: rank(3, 2, 4)}, wanted)
    assert "'w' is float32 [6] on rank 0 and float32 [4] on rank 1" in text
    held = {0: rank(0, 3, 5), 1: rank(3, 2, 5)}
    if wanted_dim == 5:
        assert plan_lanes(held, by_digest(wanted)).nbytes == 20
    else:
        assert "'w' float32 [5] -> float32 [6]" in refused(held, wanted)


@pytest.mark.parametrize("local", ["float32", "float16"])
def test_case_A27_dtypes_are_agreed_before_the_first_byte(local: str) -> None:
    """Any local dtype may serve a bfloat16 slot if the wire says bfloat16; a holding that says otherwise is refused."""
    tensors = [("w", (4, 4))]
    plan = plan_lanes({0: rows(tensors, dtype="bfloat16", local=local)}, by_digest(rows(tensors, dtype="bfloat16")))
    assert [spec.dtype for lane in plan.lanes for spec in lane.manifest.tensors] == ["bfloat16"]
    text = refused({0: rows(tensors, dtype=local)}, rows(tensors, dtype="bfloat16"))
    assert f"tensors differ (trainer -> wanted): 'w' {local} [4, 4] -> bfloat16 [4, 4]" in text


def test_case_A03_ties_on_which_the_sides_disagree_are_refused() -> None:
    """The receiver ties head to embed; the trainer has two tensors, so that one of them would be lost."""
    embed, both = [("embed", (8, 4))], [("embed", (8, 4)), ("head", (8, 4))]
    tied = with_tie(rows(embed), "head", "embed")
    assert "'embed' = 'head'" in refused({0: rows(both)}, tied)
    text = refused({0: rows(both), 1: tied}, rows(both))
    assert "'head' is float32 [8, 4] on rank 0 and float32 [8, 4] tied to 'embed' on rank 1" in text


def test_case_A03_ties_on_which_the_sides_agree_move_once() -> None:
    """Tied on both sides, only by the trainer, only by the receiver: one payload, and it reaches every place."""
    embed, head = [("embed", (8, 4))], [("head", (8, 4))]
    tied, untied = with_tie(rows(embed), "head", "embed"), rows([*embed, *head])
    reversed_tie = with_tie(rows(head), "embed", "head")
    for held, wanted, places in (
        (tied, tied, 1),
        (tied, untied, 2),
        (tied, rows(head), 1),
        (tied, reversed_tie, 1),
        (rows(embed), tied, 1),
        (rows(head), tied, 1),
    ):
        plan = plan_lanes({0: held}, by_digest(wanted))
        assert plan.nbytes == 8 * 4 * 4
        (lane,) = plan.lanes
        (view,) = Locator(wanted).views(lane)
        assert len(view[0]) == places


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        ([TensorSpec("x", "float32", (4,), "w")], "'x' is float32 [4] tied to 'w', which is no tensor"),
        ([TensorSpec("x", "int32", (8, 4), "w")], "'x' is int32 [8, 4] tied to 'w', which is no tensor"),
        ([TensorSpec("x", "float32", (8, 4), "y")], "'x' is float32 [8, 4] tied to 'y', which is no tensor"),
        (
            [TensorSpec("x", "float32", (8, 4), "w"), TensorSpec("y", "float32", (8, 4), "x")],
            "'y' is float32 [8, 4] tied",
        ),
        ([TensorSpec("w", "int8", ())], "a holding names tensors twice: w"),
    ],
)
def test_a_holding_s_own_ties_and_names_are_checked(specs: list[TensorSpec], text: str) -> None:
    """Tied to another shape or dtype, to nothing, to an alias; and the same name twice: on either side."""
    good = rows([("w", (8, 4))])
    bad = msgspec.structs.replace(good, tensors=(*good.tensors, *specs))
    assert text in refused({0: good}, bad)
    assert text in refused({0: bad}, good)


def test_case_A48_wanted_tensors_that_nobody_holds_are_named() -> None:
    """25 layers against 24; a misspelt name; and a part of the model, which is fine when it is what is wanted."""

    def layers(count: int) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"layers.{i}.{part}", (4, 2)) for i in range(count) for part in ("up", "down")]

    held = {0: rows(layers(24))}
    text = refused(held, rows(layers(25)))
    assert "wanted, but held by no trainer rank: layers.24.down, layers.24.up;" in text
    assert "layers.0.upp" in refused(held, rows([("layers.0.upp", (4, 2)), *layers(1)]))
    assert "layers.28.up and 2 more" in refused(held, rows(layers(30)))
    extra = {0: rows([*layers(2), ("extra", (4, 2))])}
    assert plan_lanes(extra, by_digest(rows(layers(2)))).unwanted == ("extra",)
    part = [("layers.0.up", (4, 2)), ("layers.3.down", (4, 2))]
    plan = plan_lanes(held, by_digest(rows(part)))
    assert [fragment.tensor for lane in plan.lanes for fragment in lane.fragments] == ["layers.0.up", "layers.3.down"]


def test_case_A48_a_hole_is_named_with_tensor_region_and_who_wants_it() -> None:
    """Rank 1 of 3 is missing."""
    tensors = [("w", (9, 2)), ("x", (9, 2))]
    wanted = rows(tensors)
    text = refused({i: shares(tensors, 3)[i] for i in (0, 2)}, wanted, error=PlanError)
    assert "no trainer rank holds 'w'[3:6,0:2], which is wanted (and 1 tensors" in text
    assert f"holding {wanted.digest()[:12]}" in text


def test_case_B02_names_that_only_one_rank_has_are_no_disagreement() -> None:
    """Sidecars of a quantized tensor on rank 0 only: moved if they are wanted, and listed if they are not."""
    sidecars = [(f"w.{name}", (4,)) for name in ("absmax", "quant_map", "quant_state")]
    tensors = [("w", (8, 2))]
    held = {0: rows([*tensors, *sidecars], 0, 0.5), 1: rows(tensors, 0.5, 1)}
    plan = plan_lanes(held, by_digest(rows(tensors)))
    assert plan.nbytes == 64
    assert plan.unwanted == ("w.absmax", "w.quant_map", "w.quant_state")
    assert "'w.absmax'[2:4]" in refused(held, rows([*tensors, *sidecars]), error=PlanError)


def test_case_B03_order_does_not_matter_and_shapes_do() -> None:
    """Buffers [a(4), b(2)] on rank 0 and [b(2), a(4)] on rank 1: one plan whatever their order."""
    ab, wanted = [("a", (4,)), ("b", (2,))], rows([("a", (4,)), ("b", (2,))])
    plan = plan_lanes({0: rows(ab), 1: rows(ab[::-1])}, by_digest(wanted))
    assert plan == plan_lanes({1: rows(ab), 0: rows(ab[::-1])}, by_digest(wanted))
    assert "'a' is float32 [4] on rank 0 and float32 [2] on rank 1, 'b' is" in refused(
        {0: rows(ab), 1: rows([("a", (2,)), ("b", (4,))])}, wanted
    )


def test_sources_of_the_same_are_loaded_evenly() -> None:
    """Four replicas of ten tensors of several sizes, and one rank that must send something that only it has."""
    tensors = [(f"t{i}", (64 >> (i % 4), 8)) for i in range(40)]
    only = [("only", (200, 8))]
    held = {0: rows([*tensors, *only]), **{rank: rows(tensors) for rank in (1, 2, 3)}}
    plan = plan_lanes(held, by_digest(rows([*tensors, *only])))
    sent = egress(plan, 4)
    assert sum(sent) == plan.nbytes == rows([*tensors, *only]).nbytes
    assert max(sent) - min(sent) <= 8 * 8 * 4, sent


def test_replicas_with_one_layout_share_lanes() -> None:
    """Two halves wanted by workers of their own, and norms wanted by both: three lanes, and the norms move once."""
    wanted = []
    for half in range(2):
        builder = HoldingBuilder()
        builder.tensor("w", "float32", (4, 2))
        builder.tensor("norm", "float32", (2,))
        builder.local("w", "float32", (2, 2))
        builder.local("norm", "float32", (2,))
        builder.piece("w", Region((2 * half, 0), (2, 2)), "w", (0, 0))
        builder.piece("norm", Region((0,), (2,)), "norm", (0,))
        wanted.append(builder.build())
    digests = sorted(holding.digest() for holding in wanted)
    plan = plan_lanes({5: rows([("w", (4, 2)), ("norm", (2,))])}, by_digest(*wanted))
    assert sorted(lane.receivers for lane in plan.lanes) == sorted([(digests[0],), (digests[1],), tuple(digests)])
    assert plan.nbytes == 40
    for digest in digests:
        assert {fragment.tensor for lane in plan.of_receiver(digest) for fragment in lane.fragments} == {"w", "norm"}
    text = plan.explain()
    assert "3 lanes, 40 bytes, 1 sources, 2 receiving holdings" in text
    assert "trainer rank 5: 3 lanes, 40 bytes" in text
    assert f"holding {digests[0][:12]}: 24 bytes from 2 lanes" in text


def test_a_lane_s_id_is_its_content() -> None:
    """What another rank or another tensor does leaves a lane its id; what it carries, from whom and to whom do not."""
    a, b = [("a", (4, 2))], [("b", (4, 2))]
    (first,) = plan_lanes({0: rows(a)}, by_digest(rows(a))).lanes
    again = plan_lanes({0: rows(a), 1: rows(b)}, by_digest(rows(a), rows(b)))
    assert first.lane_id in {lane.lane_id for lane in again.lanes}
    others = [
        plan_lanes({1: rows(a)}, by_digest(rows(a))),
        plan_lanes({0: rows([("a", (4, 3))])}, by_digest(rows([("a", (4, 3))]))),
        plan_lanes({0: rows(a, dtype="int32")}, by_digest(rows(a, dtype="int32"))),
        plan_lanes({0: rows(b)}, by_digest(rows(b))),
        plan_lanes({0: rows(a)}, by_digest(rows(a, 0, 0.5))),
    ]
    ids = [lane.lane_id for plan in others for lane in plan.lanes]
    tied = with_tie(rows(a), "head", "a")
    ids += [lane.lane_id for lane in plan_lanes({0: tied}, by_digest(rows(a))).lanes]
    assert len({first.lane_id, *ids}) == 1 + len(ids)


def test_a_lane_s_id_does_not_depend_on_what_else_was_planned_with_its_tensors() -> None:
    """Rank 0 has the upper half of all three; who has the lower half of 'b' is nothing to its lane."""
    tensors = [("a", (4, 2)), ("b", (4, 2)), ("c", (4, 2))]
    wanted, upper = by_digest(rows(tensors)), rows(tensors, 0, 0.5)
    alike = plan_lanes({0: upper, 1: rows(tensors, 0.5, 1)}, wanted)
    mixed = plan_lanes({0: upper, 1: rows(tensors[::2], 0.5, 1), 2: rows(tensors[1:2], 0.5, 1)}, wanted)
    assert alike.of_source(0) == mixed.of_source(0)
    assert alike.plan_id != mixed.plan_id


def test_a_lane_lists_its_fragments_in_canonical_order_and_survives_the_wire() -> None:
    tensors = [("b", (4, 2)), ("a", (4, 2)), ("c", (2,))]
    plan = plan_lanes({0: rows(tensors)}, by_digest(rows(tensors)))
    (lane,) = plan.lanes
    assert lane.fragments == tuple(Fragment(name, Region.whole(dict(tensors)[name])) for name in "abc")
    assert [spec.name for spec in lane.manifest.tensors] == ["a[0:4,0:2]", "b[0:4,0:2]", "c[0:2]"]
    assert [spec.shape for spec in lane.manifest.tensors] == [(4, 2), (4, 2), (2,)]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=ShardPlan)
    assert decoded == plan
    assert decoded.lanes[0].manifest == lane.manifest
    prove(decoded, {0: rows(tensors)}, by_digest(rows(tensors)))


def test_views_give_every_place_of_a_fragment() -> None:
    """The receiver keeps the tensor twice, once transposed; the source has it as rows 2 and 3 of a larger local."""
    builder = HoldingBuilder()
    builder.tensor("w", "float32", (2, 3))
    builder.local("big", "float32", (8, 3))
    builder.piece("w", Region.whole((2, 3)), "big", (2, 0))
    source = builder.build()
    builder = HoldingBuilder()
    builder.tensor("w", "float32", (2, 3))
    builder.local("here", "float32", (2, 3))
    builder.local("there", "float32", (3, 2))
    builder.piece("w", Region.whole((2, 3)), "here", (0, 0))
    builder.piece("w", Region.whole((2, 3)), "there", (0, 0), (1, 0))
    receiver = builder.build()
    (lane,) = plan_lanes({0: source}, by_digest(receiver)).lanes
    assert Locator(source).views(lane) == [((Place(0, (2, 0), (0, 1), (1, 1)),), (2, 3))]
    assert Locator(receiver).views(lane) == [
        ((Place(0, (0, 0), (0, 1), (1, 1)), Place(1, (0, 0), (1, 0), (1, 1))), (2, 3)),
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"'w'\[0:2,0:3\] of lane .* is in no piece here"):
        Locator(rows([("other", (2, 3))])).views(lane)


def test_thousands_of_pieces_of_one_tensor() -> None:
    """Rows permuted one by one, or columns: planning, proof and places take no time with the square of the pieces."""
    count = 4000
    for dim in range(2):
        shape = (count, 2) if dim == 0 else (2, count)
        builder = HoldingBuilder()
        builder.tensor("w", "float32", shape)
        builder.local("w", "float32", shape)
        for i in range(count):
            offset, start = [0, 0], [0, 0]
            offset[dim], start[dim] = i, i * 7 % count
            builder.piece("w", Region(tuple(offset), (1, 2) if dim == 0 else (2, 1)), "w", start)
        permuted = builder.build()
        begin = time.process_time()
        for held, wanted in ((rows([("w", shape)]), permuted), (permuted, rows([("w", shape)])), (permuted, permuted)):
            (lane,) = plan_lanes({0: held}, by_digest(wanted)).lanes
            assert len(Locator(held).views(lane)) == len(Locator(wanted).views(lane)) == count
        check_wanted(permuted)
        assert time.process_time() - begin < 5


def test_the_big_model_of_the_benchmark_is_planned_evenly_and_moves_once() -> None:
    """Its checkpoint has 69,975 tensors and 1.03e12 parameters; a small one of the same kind is planned here."""
    names, numel = set(), 0
    for tensor in tensors_of(Size()):
        names.add(tensor.name)
        numel += math.prod(tensor.shape)
    assert len(names) == 69_975
    assert round(numel / 1e12, 2) == 1.03
    size = Size(num_layers=2, num_experts=16, num_trainers=16, num_expert_groups=4, num_workers=4)
    held = {rank: trainer(size, rank) for rank in range(size.num_trainers)}
    workers = [worker(size, rank) for rank in range(size.num_workers)]
    for holding in workers:
        check_wanted(holding)
    plan = plan_lanes(held, by_digest(*workers))
    assert plan.nbytes == sum(math.prod(t.shape) * ITEMSIZE[t.dtype] for t in tensors_of(size))
    for holding in workers:
        assert sum(lane.nbytes for lane in plan.of_receiver(holding.digest())) == holding.nbytes
    assert max(egress(plan, 16)) - min(egress(plan, 16)) < plan.nbytes / 16 / 1000


def test_more_than_is_wanted_is_refused_by_the_proof() -> None:
    held, wanted = {0: rows([("w", (4, 2))])}, by_digest(rows([("w", (4, 2))], 0, 0.5))
    plan = plan_lanes(held, wanted)
    (lane,) = plan.lanes
    more = msgspec.structs.replace(lane, bundles=(*lane.bundles, Bundle("float32", Region((2, 0), (2, 2)), ("w",))))
    with pytest.raises(PlanError, match=r"'w'\[2:4,0:2\] would be sent to holding \w{12}, which does not want it"):
        prove(msgspec.structs.replace(plan, lanes=(more,)), held, wanted)


def test_nothing_to_move_is_a_plan() -> None:
    empty = rows([("w", (0, 3))])
    assert plan_lanes({0: empty}, by_digest(empty)).lanes == ()
    assert plan_lanes({}, {}).lanes == ()
    assert isinstance(plan_lanes({0: empty}, {}), ShardPlan)
    assert ShardLane("id", 0, (), ()).nbytes == 0
