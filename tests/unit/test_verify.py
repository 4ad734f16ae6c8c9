"""`wsync verify`: digests that do not depend on the layout find every fault in a mapping, and nothing else.

A toy model goes from a trainer of two ranks that hold rows to an engine of two workers with fused, stacked, transposed
and tied weights. Each fault is one that real frameworks had; the engine's memory is filled by plain numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync import Publisher, ShardPublisher
from wsync.cli import main
from wsync.engine.tensors import check_arrays
from wsync.engine.verify import DigestReport, PartDigest, TensorDigest, check, common_cuts, compare, digest_report
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Holding, HoldingBuilder, Region

H, E, INNER, V = 8, 4, 6, 10
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (V, H),
    "lm_head": (V, H),
    "q": (H, H),
    "k": (4, H),
    "v": (4, H),
    "gate": (INNER, H),
    "up": (INNER, H),
    "o": (H, H),
    **{f"experts.{e}.up": (INNER, H) for e in range(E)},
    "norm": (H,),
    "scale": (),
    "bias": (4,),
}
ALIASES = {"lm_head": "embed"}
Arrays = dict[str, Any]


def full(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    made: Arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    made["bias"] = np.arange(509, 513, dtype=np.float32)  # differ in bits that bfloat16 does not have
    return made | {alias: made[name] for alias, name in ALIASES.items()}


def builder() -> HoldingBuilder:
    built = HoldingBuilder()
    for name, shape in SHAPES.items():
        built.tensor(name, "float32", shape, ALIASES.get(name, ""))
    return built


def trainer(rank: int, source: Arrays) -> tuple[Holding, Arrays]:
    """Rows of what has rows; the rest is replicated."""
    built, locals_ = builder(), {}
    for name, shape in SHAPES.items():
        if name in ALIASES:
            continue
        rows = shape[0] // 2 if shape else 0
        cut = source[name][rank * rows : (rank + 1) * rows] if rows else source[name]
        locals_[name] = cut.copy()
        built.local(name, "float32", cut.shape)
        offset = (rank * rows, *(0,) * (len(shape) - 1)) if rows else ()
        built.piece(name, Region(offset, cut.shape), name, (0,) * len(shape))
    return built.build(), locals_


def worker(rank: int, source: Arrays) -> tuple[Holding, Arrays]:
    """Fused qkv (heads of two rows; k and v replicated), gate_up, stacked experts, `o` transposed, padded embedding."""
    built, locals_ = builder(), {}

    def local(name: str, array: Any, padding: tuple[Region, ...] = ()) -> None:
        locals_[name] = array.copy()
        built.local(name, "float32", array.shape, padding)

    q = slice(rank * 4, rank * 4 + 4)
    local("qkv", np.concatenate([source["q"][q], source["k"], source["v"]]))
    built.piece("q", Region((q.start, 0), (4, H)), "qkv", (0, 0))
    built.piece("k", Region.whole((4, H)), "qkv", (4, 0))
    built.piece("v", Region.whole((4, H)), "qkv", (8, 0))
    half = slice(rank * 3, rank * 3 + 3)
    local("gate_up", np.concatenate([source["gate"][half], source["up"][half]]))
    built.piece("gate", Region((half.start, 0), (3, H)), "gate_up", (0, 0))
    built.piece("up", Region((half.start, 0), (3, H)), "gate_up", (3, 0))
    local("o", source["o"][:, rank * 4 : rank * 4 + 4].T)
    built.piece("o", Region((0, rank * 4), (H, 4)), "o", (0, 0), (1, 0))
    mine = [f"experts.{e}.up" for e in range(E) if e % 2 == rank]
    local("experts", np.stack([source[name] for name in mine]))
    for index, name in enumerate(mine):
        built.piece(name, Region.whole((INNER, H)), "experts", (index, 0, 0), (1, 2))
    rows = slice(rank * 6, min(V, rank * 6 + 6))
    pad = np.zeros((6 - (rows.stop - rows.start), H), np.float32)
    padding = (Region((6 - len(pad), 0), pad.shape),) if len(pad) else ()
    local("embed", np.concatenate([source["embed"][rows], pad]), padding)
    built.piece("embed", Region((rows.start, 0), (rows.stop - rows.start, H)), "embed", (0, 0))
    for name in ("norm", "scale", "bias"):
        local(name, source[name])
        built.piece(name, Region.whole(SHAPES[name]), name, (0,) * len(SHAPES[name]))
    return built.build(), locals_


Engine = list[tuple[Holding, Arrays]]


def reports(members: Engine) -> list[DigestReport]:
    return [digest_report(holding, locals_, member=str(rank)) for rank, (holding, locals_) in enumerate(members)]


def named(source: Engine, engine: Engine) -> set[str]:
    return {difference.tensor for difference in compare(reports(source), reports(engine))}


def swap_halves(engine: Engine) -> None:
    block = engine[0][1]["gate_up"]
    block[:] = np.concatenate([block[3:], block[:3]])


def transpose_square(engine: Engine) -> None:
    for rank, (_, locals_) in enumerate(engine):
        locals_["o"][:] = full(1)["o"].T[:, rank * 4 : rank * 4 + 4].T


def shift_expert(engine: Engine) -> None:
    engine[1][1]["experts"][:] = np.roll(engine[1][1]["experts"], 1, axis=0)


def stale(name: str, where: Any = ...) -> Callable[[Engine], None]:
    """One local keeps the bytes of the former version."""

    def fault(engine: Engine) -> None:
        old = worker(0, full(0))[1]
        engine[0][1][name][where] = old[name][where]

    return fault


def interleave_qkv(engine: Engine) -> None:
    """Per query group instead of concatenated."""
    block = engine[0][1]["qkv"]
    q, k, v = block[:4].copy(), block[4:8].copy(), block[8:].copy()
    block[:] = np.concatenate([q[:2], k[:2], v[:2], q[2:], k[2:], v[2:]])


def cast_to_bfloat16(engine: Engine) -> None:
    for _, locals_ in engine:
        bits = locals_["bias"].view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        bits &= np.uint32(0xFFFF0000)


def wrong_rank(engine: Engine) -> None:
    engine[0][1]["embed"][:] = np.concatenate([full(1)["embed"][6:], full(1)["embed"][:2]])


def one_bit(engine: Engine) -> None:
    engine[1][1]["norm"].view(np.uint32)[3] ^= 1


def negative_zero(engine: Engine) -> None:
    for _, locals_ in engine:
        locals_["norm"][0] = -0.0


def uninitialised(engine: Engine) -> None:
    engine[0][1]["experts"][1] = np.nan


def replica_differs(engine: Engine) -> None:
    """Key heads that two workers have both, and one of them has not got."""
    engine[1][1]["qkv"][5] = 3


def scaled(engine: Engine) -> None:
    for _, locals_ in engine:
        locals_["scale"] *= np.float32(2)


def repeated_row(engine: Engine) -> None:
    engine[0][1]["gate_up"][1] = engine[0][1]["gate_up"][0]


FAULTS: dict[str, tuple[Callable[[Engine], None], set[str]]] = {
    "swapped halves": (swap_halves, {"gate", "up"}),
    "transposed square": (transpose_square, {"o"}),
    "shifted expert": (shift_expert, {"experts.1.up", "experts.3.up"}),
    "stale tie": (stale("embed"), {"embed", "lm_head"}),
    "dropped buffer": (stale("scale"), {"scale"}),
    "stale norm": (stale("norm"), {"norm"}),
    "query groups interleaved": (interleave_qkv, {"q", "k", "v"}),
    "router bias cast": (cast_to_bfloat16, {"bias"}),
    "another rank's rows": (wrong_rank, {"embed", "lm_head"}),
    "one bit": (one_bit, {"norm"}),
    "negative zero": (negative_zero, {"norm"}),
    "expert never written": (uninitialised, {"experts.2.up"}),
    "replicas differ": (replica_differs, {"k"}),
    "applied twice": (scaled, {"scale"}),
    "row repeated": (repeated_row, {"gate"}),
    "half of a fused block stale": (stale("qkv", slice(8, None)), {"v"}),
}


@pytest.fixture
def source() -> Engine:
    made = full(1)
    made["norm"][0] = 0.0
    return [trainer(rank, made) for rank in range(2)]


@pytest.fixture
def engine() -> Engine:
    made = full(1)
    made["norm"][0] = 0.0
    return [worker(rank, made) for rank in range(2)]


def test_the_right_weights_raise_no_alarm(source: Engine, engine: Engine) -> None:
    assert named(source, engine) == set()
    check(reports(source), reports(engine))
    assert named(source, [worker(rank, full(0)) for rank in range(2)]) == set(SHAPES) - {"bias"}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_seeded_fault_is_named(fault: str, source: Engine, engine: Engine) -> None:
    break_it, expected = FAULTS[fault]
    break_it(engine)
    assert named(source, engine) == expected
    with pytest.raises(ManifestMismatch, match=min(expected)):
        check(reports(source), reports(engine))


def test_what_a_side_lacks_is_named(source: Engine, engine: Engine) -> None:
    ours, theirs = reports(source), reports(engine)

    def without(side: list[DigestReport], name: str) -> list[DigestReport]:
        return [
            DigestReport(report.member, 0, tuple(tensor for tensor in report.tensors if tensor.name != name))
            for report in side
        ]

    assert [str(d) for d in compare(ours, without(theirs, "k"))] == ["k: the replica does not have it"]
    assert [str(d) for d in compare(without(ours, "k"), theirs)] == ["k: the trainer does not have it"]
    assert {d.tensor for d in compare(ours, theirs[:1])} == {"q", "gate", "up", "o", "embed", "lm_head"} | {
        f"experts.{e}.up" for e in (1, 3)
    }


def test_a_tie_that_only_one_side_names_is_no_alarm(source: Engine, engine: Engine) -> None:
    """A recorded loader speaks of the root only; the trainer's head is the embedding."""

    def untied(side: list[DigestReport]) -> list[DigestReport]:
        return [DigestReport("", 0, tuple(t for t in report.tensors if t.name != "lm_head")) for report in side]

    assert compare(reports(source), untied(reports(engine))) == []
    assert compare(untied(reports(source)), reports(engine)) == []
    FAULTS["stale tie"][0](engine)
    assert [d.tensor for d in compare(reports(source), untied(reports(engine)))] == ["embed"]


def test_shapes_and_versions_that_do_not_go_together() -> None:
    def report(shape: tuple[int, ...], region: Region, version: int = 0) -> DigestReport:
        return DigestReport("m", version, (TensorDigest("w", "float32", shape, (PartDigest(region, 1),)),))

    flat, square = report((4,), Region((0,), (4,))), report((2, 2), Region((0, 0), (2, 2)))
    assert [str(d) for d in compare([flat], [square])] == ["w: float32 [4] in the trainer, float32 [2, 2] here"]
    with pytest.raises(ConfigError, match="overlap in part"):
        compare([flat, report((4,), Region((2,), (2,)))], [flat])
    with pytest.raises(ConfigError, match=r"versions \[1, 2\]"):
        compare([report((4,), Region((0,), (4,)), 1)], [report((4,), Region((0,), (4,)), 2)])


def test_members_whose_regions_overlap_in_part_need_common_cuts() -> None:
    array = np.arange(10, dtype=np.float32)

    def member(start: int, stop: int) -> tuple[Holding, Arrays]:
        built = HoldingBuilder()
        built.tensor("w", "float32", (10,))
        built.local("w", "float32", (stop - start,))
        built.piece("w", Region((start,), (stop - start,)), "w", (0,))
        return built.build(), {"w": array[start:stop].copy()}

    ours, theirs = [member(0, 6), member(4, 10)], [member(0, 3), member(2, 10)]
    with pytest.raises(ConfigError, match="overlap in part"):
        named(ours, theirs)
    cuts = common_cuts(holding for holding, _ in (*ours, *theirs))

    def cut(side: Engine) -> list[DigestReport]:
        return [digest_report(holding, locals_, cuts=cuts) for holding, locals_ in side]

    assert compare(cut(ours), cut(theirs)) == []
    ours[1][1]["w"][1] = 3
    assert [str(d) for d in compare(cut(ours), cut(theirs))] == ["w: [4:6] differs between members of the trainer ()"]
    ours[0][1]["w"][5] = 3
    assert [str(d) for d in compare(cut(ours), cut(theirs))] == ["w: the bytes differ"]


def tied(piece: str, array: Any, *spans: tuple[int, int]) -> tuple[Holding, Arrays]:
    """`h` is tied to `e`; pieces of one of the names, each in a local of its own."""
    built, locals_ = HoldingBuilder(), {}
    built.tensor("e", "float32", array.shape)
    built.tensor("h", "float32", array.shape, "e")
    for start, stop in spans:
        locals_[f"{start}"] = array[start:stop].copy()
        built.local(f"{start}", "float32", (stop - start,))
        built.piece(piece, Region((start,), (stop - start,)), f"{start}", (0,))
    return built.build(), locals_


@pytest.mark.parametrize("piece", ["e", "h"])
def test_a_piece_of_either_tied_name_stands_for_both(piece: str) -> None:
    array = np.arange(4, dtype=np.float32)
    ours, theirs = [tied("e", array, (0, 4))], [tied(piece, array, (0, 1), (1, 4))]
    assert named(ours, theirs) == set()
    theirs[0][1]["1"][0] = 7
    assert named(ours, theirs) == {"e", "h"}


def test_tied_names_are_cut_in_common() -> None:
    array = np.arange(6, dtype=np.float32)
    side = [tied("e", array, (0, 4)), tied("h", array, (2, 6))]
    cuts = common_cuts(holding for holding, _ in side)
    assert cuts == {"e": ((0, 2, 4, 6),)}
    made = [digest_report(holding, locals_, cuts=cuts) for holding, locals_ in side]
    assert compare(made, reports([tied("e", array, (0, 6))])) == []


WRONG_LOCALS: dict[str, tuple[Arrays, str]] = {
    "too few elements": ({"0": np.zeros(2, np.float32)}, r"'0' is float32 \[2\], its holding says float32 \[4\]"),
    "too many elements": ({"0": np.zeros(6, np.float32)}, r"'0' is float32 \[6\]"),
    "another dtype": ({"0": np.zeros(4, np.int32)}, r"'0' is int32 \[4\]"),
    "missing": ({}, "'0' of the holding is not among"),
}


@pytest.mark.parametrize("wrong", WRONG_LOCALS)
def test_locals_that_do_not_suit_their_holding_are_refused(wrong: str) -> None:
    locals_, problem = WRONG_LOCALS[wrong]
    holding, _ = tied("e", np.zeros(4, np.float32), (0, 4))
    with pytest.raises((ConfigError, ManifestMismatch), match=problem):
        digest_report(holding, locals_)


WRONG_TENSORS: dict[str, tuple[str, tuple[int, ...], Region, str]] = {
    "a region beyond the shape": ("float32", (4,), Region((2,), (3,)), r"region \[2:5\] of 'w' does not lie in \[4\]"),
    "a region of another rank": (
        "float32",
        (4,),
        Region(
            (
                0,
                0,
            ),
            (
                2,
                2,
            ),
        ),
        r"region \[0:2,0:2\] of 'w'",
    ),
    "a region of a scalar": ("float32", (), Region((0,), (1,)), r"does not lie in \[\]"),
    "an unknown dtype": ("float31", (4,), Region((0,), (4,)), "'w' has dtype 'float31'"),
    "a negative shape": ("float32", (-4,), Region((0,), (4,)), "'w' has a negative extent"),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_reports_of_no_possible_tensor_are_refused(wrong: str, tmp_path: Path) -> None:
    dtype, shape, region, problem = WRONG_TENSORS[wrong]
    with pytest.raises(ManifestMismatch, match=problem):
        TensorDigest("w", dtype, shape, (PartDigest(region, 1),))
    tensor = {"name": "w", "dtype": dtype, "shape": shape, "parts": [(region, 1)]}
    file = tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode({"member": "0", "version": 0, "tensors": [tensor]}))
    with pytest.raises(ConfigError, match=problem):
        DigestReport.load(file)


def test_a_side_without_tensors_is_refused(source: Engine) -> None:
    full_side = reports(source)
    for empty in ([], [DigestReport("0", 0, ())]):
        with pytest.raises(ConfigError, match=f"the {len(empty)} reports of the replica have no tensors"):
            compare(full_side, empty)
        with pytest.raises(ConfigError, match=f"the {len(empty)} reports of the trainer have no tensors"):
            check(empty, full_side)
    assert compare([*full_side, DigestReport("idle", 0, ())], full_side) == []


def test_cuts_of_holdings_of_different_ranks_are_refused() -> None:
    flat, _ = tied("e", np.zeros(4, np.float32), (0, 4))
    built = HoldingBuilder()
    built.tensor("e", "float32", (2, 2))
    built.local("e", "float32", (2, 2))
    built.piece("e", Region.whole((2, 2)), "e", (0, 0))
    with pytest.raises(ManifestMismatch, match="'e' has 1 dims in one holding, 2 in another"):
        common_cuts([flat, built.build()])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_digests_do_not_depend_on_the_cut(data: st.DataObject) -> None:
    """Any grid of boxes over the tensor adds up to the same, in any dtype; one changed element does not."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    dtype = data.draw(st.sampled_from(["uint8", "int16", "float32", "float64", "complex128", "bool"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    array = rng.integers(0, 2, shape).astype(dtype)
    edges = [
        sorted({0, extent, *data.draw(st.lists(st.integers(0, extent), max_size=2))}) for extent in shape
    ]  # fmt: skip
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    boxes: list[tuple[tuple[int, int], ...]] = [()]
    for axis in spans:
        boxes = [(*box, span) for box in boxes for span in axis]
    side: list[DigestReport] = []
    for box in boxes:
        built = HoldingBuilder()
        built.tensor("w", dtype, shape)
        cut = array[tuple(slice(*span) for span in box)].T.copy()
        built.local("w", dtype, cut.shape)
        region = Region(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        built.piece("w", region, "w", (0,) * len(shape), tuple(reversed(range(len(shape)))))
        side.append(digest_report(built.build(), {"w": cut}))
    built = HoldingBuilder()
    built.tensor("w", dtype, shape)
    built.local("w", dtype, shape)
    built.piece("w", Region.whole(shape), "w", (0,) * len(shape))
    whole = built.build()
    assert compare([digest_report(whole, {"w": array})], side) == []
    other = array.copy()
    other[tuple(int(rng.integers(extent)) for extent in shape)] += np.array(1, dtype) if dtype != "bool" else True
    if not np.array_equal(other, array):
        assert [d.tensor for d in compare([digest_report(whole, {"w": other})], side)] == ["w"]


def test_large_tensors_are_read_in_blocks() -> None:
    """Blocks of both sides begin elsewhere."""
    array = np.random.default_rng(1).integers(0, 1 << 16, (3, 700, 800)).astype(np.uint16)
    built = HoldingBuilder()
    built.tensor("w", "uint16", array.shape)
    built.local("w", "uint16", array.shape)
    built.piece("w", Region.whole(array.shape), "w", (0, 0, 0))
    turned = HoldingBuilder()
    turned.tensor("w", "uint16", array.shape)
    turned.local("w", "uint16", array.T.shape)
    turned.piece("w", Region.whole(array.shape), "w", (0, 0, 0), (2, 1, 0))
    one, other = digest_report(built.build(), {"w": array}), digest_report(turned.build(), {"w": array.T.copy()})
    assert one.tensors == other.tensors


def saved(folder: Path, trainers: list[DigestReport], workers: list[DigestReport]) -> list[str]:
    """The command that compares these reports, which are in files now."""
    command = ["verify"]
    for side, members in (("trainer", trainers), ("replica", workers)):
        command.append(f"--{side}")
        for index, report in enumerate(members):
            command.append(str(folder / f"{side}{index}.json"))
            report.save(command[-1])
    return command


def test_the_command(source: Engine, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shift_expert(engine)
    assert main(saved(tmp_path, reports(source), reports(engine))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "experts.1.up: the bytes differ",
        "experts.3.up: the bytes differ",
        f"2 of {len(SHAPES)} tensors differ",
    ]
    assert main(saved(tmp_path, reports(source), reports(source))) == 0
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert main(["verify", "--trainer", str(bad), "--replica", str(bad)]) == 2
    assert "bad.json" in capsys.readouterr().err


def test_an_option_of_the_command_that_is_given_twice_adds_up(source: Engine, engine: Engine, tmp_path: Path) -> None:
    _, ours, *trainers, theirs, worker0, worker1 = saved(tmp_path, reports(source), reports(engine))
    arguments = [word for path in trainers for word in (ours, path)]
    assert main(["verify", *arguments, theirs, worker0, theirs, worker1]) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_command_says_that_a_report_seems_to_be_missing(
    rank: int, source: Engine, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a line for every tensor that is cut; and not the exit status of weights that differ."""
    ours, theirs = reports(source), reports(engine)
    for trainers, workers, side, member in (
        (ours[rank : rank + 1], theirs, "trainer", "rank"),
        (ours, theirs[rank : rank + 1], "replica", "worker"),
    ):
        assert main(saved(tmp_path, trainers, workers)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"incomplete in the 1 reports of the {side}: the report of a {member} seems to be missing" in err


def test_one_tensor_that_is_mapped_in_part_is_a_difference(
    source: Engine, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = reports(engine)
    partly = tuple(msgspec.structs.replace(t, parts=()) if t.name == "q" else t for t in second.tensors)
    workers = [first, msgspec.structs.replace(second, tensors=partly)]
    assert main(saved(tmp_path, reports(source), workers)) == 1
    assert capsys.readouterr().out.splitlines()[0] == "q: the replica does not have all of it"


def test_reports_of_two_versions_are_no_difference_for_the_command(source: Engine, tmp_path: Path) -> None:
    first, second = (
        [msgspec.structs.replace(report, version=version) for report in reports(source)] for version in (1, 2)
    )
    assert main(saved(tmp_path, first, first)) == 0
    assert main(saved(tmp_path, first, second)) == 2


@pytest.mark.parametrize("wire", ["bfloat16", "float8_e4m3fn", "int32"])
def test_what_numpy_cannot_cast_is_refused_by_name(wire: str) -> None:
    arrays = {"v": np.ones(3, np.float32), "w": np.ones(3, np.float32)}
    with pytest.raises(ConfigError, match=f"'w' is a numpy array of float32, which numpy cannot cast to {wire}"):
        Publisher("policy", arrays, wire_dtypes={"w": wire, "v": "float16"})
    built = HoldingBuilder()
    for name, dtype in (("v", "float16"), ("w", wire)):
        built.tensor(name, dtype, (3,))
        built.local(name, "float32", (3,))
        built.piece(name, Region.whole((3,)), name, (0,))
    with pytest.raises(ConfigError, match=f"'w' is a numpy array of float32.*{wire}.*give a torch tensor"):
        check_arrays(built.build(), arrays)
    with pytest.raises(ConfigError, match=f"'w' is a numpy array of float32.*{wire}"):
        digest_report(built.build(), arrays)
    with pytest.raises(ConfigError, match=f"'w'.*float32.*{wire}"):
        ShardPublisher("policy", built.build(), arrays, rank=0, num_ranks=1)
    torch = pytest.importorskip("torch")
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    check_arrays(built.build(), tensors)
    assert digest_report(built.build(), tensors).tensors[1].dtype == wire
