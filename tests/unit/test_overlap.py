"""Fragments are as large as they may be, and a receiver's locals are covered exactly."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from wsync.engine.groups import Grouper, near
from wsync.engine.overlap import Overlap, check_wanted, overlaps
from wsync.errors import ManifestMismatch
from wsync.holding import Holding, HoldingBuilder, Region


def box(*spans: tuple[int, int]) -> Region:
    return Region(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def test_a_fragment_has_one_set_of_sources_and_one_of_receivers() -> None:
    held = [(0, [box((0, 4), (0, 6))]), (1, [box((4, 8), (0, 6))]), (2, [box((0, 8), (0, 6))])]
    wanted = [(0, [box((2, 6), (0, 6))]), (1, [box((0, 8), (0, 3))])]
    assert overlaps(held, wanted) == [
        Overlap(box((0, 2), (0, 3)), (0, 2), (1,)),
        Overlap(box((2, 4), (0, 3)), (0, 2), (0, 1)),
        Overlap(box((2, 4), (3, 6)), (0, 2), (0,)),
        Overlap(box((4, 6), (0, 3)), (1, 2), (0, 1)),
        Overlap(box((4, 6), (3, 6)), (1, 2), (0,)),
        Overlap(box((6, 8), (0, 3)), (1, 2), (1,)),
    ]


def test_a_fragment_lies_within_one_piece_of_everybody() -> None:
    """Rank 0 has it in two pieces and the receiver in three: neighbours stay apart though the members are the same."""
    held = [(0, [box((0, 4)), box((4, 6))])]
    wanted = [(0, [box((0, 2)), box((2, 5)), box((5, 6))])]
    assert [overlap.region for overlap in overlaps(held, wanted)] == [
        box((0, 2)), box((2, 4)), box((4, 5)), box((5, 6)),
    ]  # fmt: skip


def test_cuts_elsewhere_do_not_cut_a_fragment() -> None:
    """Rank 1's rows are cut in four; rank 0's columns, which the same rows cross, stay whole."""
    held = [(0, [box((0, 8), (0, 5))]), (1, [box((i, i + 2), (5, 6)) for i in (0, 2, 4, 6)])]
    found = overlaps(held, [(0, [box((0, 8), (0, 6))])])
    assert [overlap.region for overlap in found if overlap.sources == (0,)] == [box((0, 8), (0, 5))]
    assert len(found) == 5


def test_what_nobody_holds_has_no_sources() -> None:
    found = overlaps([(0, [box((0, 3))])], [(0, [box((1, 5))])])
    assert found == [Overlap(box((1, 3)), (0,), (0,)), Overlap(box((3, 5)), (), (0,))]


def test_what_nobody_wants_is_no_fragment() -> None:
    assert overlaps([(0, [box((0, 3))])], []) == []
    assert overlaps([(0, [box((0, 3))])], [(0, [box((2, 3))])]) == [Overlap(box((2, 3)), (0,), (0,))]


def test_scalars() -> None:
    assert overlaps([(3, [box()])], [(0, [box()]), (1, [box()])]) == [Overlap(box(), (3,), (0, 1))]


def test_cuts_multiply_only_where_they_meet() -> None:
    """256 flat shards, each of a part of a row, rows, and a part: 766 pieces and 8 columns, not 512 x 520 cells."""
    rows, columns, part = 1000, 1024, 4000
    pieces: list[tuple[int, list[Region]]] = []
    for rank in range(256):
        row, column = divmod(rank * part, columns)
        end, rest = divmod((rank + 1) * part, columns)
        parts = [
            box((row, row + 1), (column, columns)),
            box((row + 1, end), (0, columns)),
            box((end, end + 1), (0, rest)),
        ]
        pieces.append((rank, [region for region in parts if region.numel]))
    wanted = [(i, [box((0, rows), (128 * i, 128 * i + 128))]) for i in range(8)]
    start = time.process_time()
    found = overlaps(pieces, wanted)
    assert time.process_time() - start < 2
    assert sum(overlap.region.numel for overlap in found) == rows * columns
    assert len(found) < 5000


def wanting(
    shape: tuple[int, ...], *pieces: tuple[Region, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
) -> Holding:
    """One local 'w' into which these regions of tensors of their own go, each as (region, start, dims, steps)."""
    builder = HoldingBuilder()
    builder.local("w", "float32", shape)
    for number, (region, start, dims, steps) in enumerate(pieces):
        builder.tensor(f"t{number}", "float32", region.end)
        builder.piece(f"t{number}", region, "w", start, dims, steps)
    return builder.build()


def refused(holding: Holding) -> str:
    with pytest.raises(ManifestMismatch) as raised:
        check_wanted(holding)
    return str(raised.value)


def test_a_hole_is_named_with_local_and_index() -> None:
    whole = box((0, 2), (0, 3))
    holding = wanting((4, 3), (whole, (0, 0), (0, 1), (1, 1)))
    assert "'w'[2, 0] is written by no tensor" in refused(holding)


def test_an_element_written_twice_is_named_with_both_tensors() -> None:
    top, low = box((0, 3), (0, 3)), box((0, 2), (0, 3))
    holding = wanting((4, 3), (top, (0, 0), (0, 1), (1, 1)), (low, (2, 0), (0, 1), (1, 1)))
    text = refused(holding)
    assert "'w'[2, 0]" in text
    assert "'t0'[0:3,0:3] and 't1'[0:2,0:3]" in text


def test_a_piece_that_overlaps_itself_is_named() -> None:
    """0, 1, 1, 2: three elements, all of them reached, and one of them twice."""
    holding = wanting((3,), (box((0, 2), (0, 2)), (0,), (0, 0), (1, 1)))
    assert "overlaps itself in 'w'" in refused(holding)


def test_padding_is_written_by_nobody() -> None:
    builder = HoldingBuilder()
    builder.tensor("t", "float32", (3,))
    builder.local("w", "float32", (4,), padding=[box((2, 4))])
    builder.piece("t", box((0, 3)), "w", (0,))
    assert "'w'[2] is written by 't'[0:3], though it is padding" in refused(builder.build())


@pytest.mark.parametrize(
    ("padding", "shape"), [(box((2, 5)), (4,)), (box((4, 5)), (4,)), (box((0, 1)), (4, 4)), (box((0, 1)), ())]
)
def test_padding_outside_of_its_local_is_refused(padding: Region, shape: tuple[int, ...]) -> None:
    with pytest.raises(ManifestMismatch, match="does not lie in local 'w'"):
        HoldingBuilder().local("w", "float32", shape, padding=[padding])


def test_a_receiver_does_not_cast() -> None:
    builder = HoldingBuilder()
    builder.tensor("t", "float32", (3,))
    builder.local("w", "bfloat16", (3,))
    builder.piece("t", box((0, 3)), "w", (0,))
    assert "'t' is wanted as float32, but its local 'w' is bfloat16" in refused(builder.build())


def test_interleaved_and_permuted_rows_are_exact() -> None:
    gate = (box((0, 2048), (0, 64)), (0, 0), (0, 1), (2, 1))
    up = (box((0, 2048), (0, 64)), (1, 0), (0, 1), (2, 1))
    check_wanted(wanting((4096, 64), gate, up))
    assert "'w'[0, 0] is written by no tensor" in refused(wanting((4096, 64), up))
    order = [(7 * i) % 1000 for i in range(1000)]
    check_wanted(wanting((1000, 8), *((box((0, 1), (0, 8)), (row, 0), (0, 1), (1, 1)) for row in order)))


def test_large_locals_need_no_mask() -> None:
    """Six billion elements: an untouched flat tensor, one by columns (so a run per row), and a transposed one."""
    n, m = 2000, 1 << 20
    pieces = [
        (box((0, n), (0, m)), (0,), (0, 0), (m, 1)),
        (box((0, n), (0, 1000)), (n * m,), (0, 0), (m, 1)),
        (box((0, n), (0, m - 1000)), (n * m + 1000,), (0, 0), (m, 1)),
        (box((0, m), (0, n)), (2 * n * m,), (0, 0), (1, m)),
    ]
    tracemalloc.start()
    try:
        check_wanted(wanting((3 * n * m,), *pieces))
        assert f"'w'[{3 * n * m}] is written by no tensor" in refused(wanting((3 * n * m + 1,), *pieces))
        assert f"'w'[{n * m + 1000}] is written by no tensor" in refused(wanting((2 * n * m,), *pieces[:2]))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def named(dtype: str = "float32", rows: int = 8, weight: str = "model.weight") -> Holding:
    builder = HoldingBuilder()
    for name in (weight, "model.bias"):
        builder.tensor(name, dtype, (rows, 4))
        builder.local(name, dtype, (rows, 4))
        builder.piece(name, box((0, rows), (0, 4)), name, (0, 0))
    return builder.build()


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (named(weight="model.wieght"), "rank: model.wieght; instead of 'model.wieght' there is 'model.weight'"),
        (named(weight="quite.another"), "rank: quite.another; publish what is wanted, or leave it out"),
        (
            named("bfloat16"),
            "bfloat16 [8, 4]; publish in the dtype that is wanted (read_state(..., dtypes=...)), or want",
        ),
        (named("bfloat16", 9), "bfloat16 [9, 4]; give both sides the same shapes"),
    ],
)
def test_a_disagreement_says_what_to_do(wanted: Holding, text: str) -> None:
    with pytest.raises(ManifestMismatch) as raised:
        Grouper().agree({0: named()}, {"worker": wanted})
    assert text in str(raised.value)


def test_a_misspelt_name_is_found_among_many_in_no_time() -> None:
    known = [
        f"layers.{i}.experts.{j}.{part}_proj.weight" for i in range(60) for j in range(384) for part in ("up", "gate")
    ]
    start = time.process_time()
    told = near(["layers.7.experts.33.upp_proj.weight", "quite.another", "layers.7.expert.33.up_proj.weight"], known)
    assert time.process_time() - start < 2
    meant = "there is 'layers.7.experts.33.up_proj.weight'"
    assert told.count(meant) == 2
    assert "quite" not in told
