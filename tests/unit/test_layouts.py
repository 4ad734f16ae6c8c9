"""Blocks against numpy: fused, cut, padded, stacked, transposed and flattened as each framework does it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from _reading import OWN, Array, fill, gather, holding_of, local_of, numbered
from hypothesis import given
from hypothesis import strategies as st
from test_sharding import distribute, shardings

from wsync.arrangements import (
    Arrangement,
    Run,
    TpRank,
    even,
    folded,
    grouped,
    heads,
    interleaved,
    joined,
    kv_heads,
    padded,
    rope_interleaved,
    scales,
    vocab_padded,
    whole,
)
from wsync.errors import ConfigError, ManifestMismatch, WsyncError
from wsync.holding import HoldingBuilder, LocalSpec, Region
from wsync.layouts import Block, block, expert_names, flattened, stacked
from wsync.sharding import OwnerMap, cuts, local_shape

SIZES = st.integers(1, 4)


def pad_rows(array: Array, rows: int) -> Array:
    return np.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)], constant_values=OWN)


@given(SIZES, SIZES, SIZES, SIZES, st.booleans(), st.data())
def test_fused_qkv_concatenated(
    kv: int, per_group: int, head_dim: int, hidden: int, is_bias: bool, data: st.DataObject
) -> None:
    """As engines do it: the rank's q heads, then its k heads, then its v heads; kv heads repeated when they run out."""
    num_q = kv * per_group * data.draw(st.sampled_from([1, 2]))
    tp_size = data.draw(st.sampled_from([n for n in range(1, num_q + 1) if num_q % n == 0 and 0 in (n % kv, kv % n)]))
    rest = () if is_bias else (hidden,)
    tensors = numbered({"q": (num_q * head_dim, *rest), **dict.fromkeys("kv", (kv * head_dim, *rest))})
    for rank in range(tp_size):
        tp = TpRank(rank, tp_size)
        rows = joined(heads("q", num_q, head_dim, tp), kv_heads("k", kv, head_dim, tp), kv_heads("v", kv, head_dim, tp))
        parts = []
        for name, num in (("q", num_q), ("k", kv), ("v", kv)):
            by_head = tensors[name].reshape(num, head_dim, *rest)
            every = np.repeat(by_head, max(1, tp_size // num), axis=0)  # replicas side by side
            parts.append(np.array_split(every, tp_size)[rank].reshape(-1, *rest))
        np.testing.assert_array_equal(local_of(block("qkv", (rows, *rest)), tensors), np.concatenate(parts))


@given(SIZES, st.lists(SIZES, min_size=1, max_size=4), SIZES, SIZES)
def test_grouped_is_interleaved_per_group(groups: int, rows: list[int], hidden: int, tp_size: int) -> None:
    names = "abcd"[: len(rows)]
    tensors = numbered({n: (groups * r, hidden) for n, r in zip(names, rows, strict=True)})
    fused = np.concatenate([tensors[n].reshape(groups, -1, hidden) for n in names], 1).reshape(-1, hidden)
    for rank in range(tp_size):
        if groups % tp_size:
            with pytest.raises(ManifestMismatch, match=f"'qkv' has {groups} heads, which {tp_size} tensor-parallel"):
                grouped("qkv", len(fused), rows, groups, TpRank(rank, tp_size))
            continue
        dim = grouped("qkv", len(fused), rows, groups, TpRank(rank, tp_size))
        expected = np.split(fused, tp_size)[rank]
        np.testing.assert_array_equal(local_of(block(names, (dim, hidden)), tensors), expected)


@given(SIZES, SIZES, SIZES, st.sampled_from([1, 2, 3]))
def test_gate_up_in_three_orders(share: int, hidden: int, num_parts: int, tp_size: int) -> None:
    names = "gux"[:num_parts]
    tensors = numbered(dict.fromkeys(names, (share * tp_size, hidden)))
    for rank in range(tp_size):
        mine = [even(n, share * tp_size, TpRank(rank, tp_size)) for n in names]
        cut = [np.split(tensors[n], tp_size)[rank] for n in names]
        np.testing.assert_array_equal(local_of(block(names, (joined(*mine), hidden)), tensors), np.concatenate(cut))
        swapped = block(names[::-1], (joined(*mine), hidden))
        np.testing.assert_array_equal(local_of(swapped, tensors), np.concatenate(cut[::-1]))
        turns = block(names, (interleaved("w", *mine), hidden))
        np.testing.assert_array_equal(local_of(turns, tensors), np.stack(cut, 1).reshape(-1, hidden))


@given(st.integers(0, 40), st.integers(1, 16), st.integers(1, 5))
def test_padded_rows_are_the_members_own(size: int, multiple: int, tp_size: int) -> None:
    total = vocab_padded(size, multiple * tp_size)
    assert 0 <= total - size < multiple * tp_size
    tensors = numbered({"w": (size, 2)})
    expected = np.split(pad_rows(tensors["w"], total), tp_size)
    for rank in range(tp_size):
        one = block(["w"], (padded("w", size, total, TpRank(rank, tp_size)), 2))
        np.testing.assert_array_equal(local_of(one, tensors), expected[rank])


def test_padding_in_several_dims_is_counted_once() -> None:
    tensors = numbered({"a": (3, 5), "b": (3, 5)})
    rows = joined(padded("a", 3, 4, TpRank()), padded("b", 3, 5, TpRank()))
    one = block("ab", (rows, padded("columns", 5, 8, TpRank())))
    expected = np.full((9, 8), OWN)
    expected[:3, :5], expected[4:7, :5] = tensors["a"], tensors["b"]
    np.testing.assert_array_equal(local_of(one, tensors), expected)
    np.testing.assert_array_equal(local_of(stacked([one.transposed((1, 0))]), tensors), expected.T[None])


@given(SIZES, st.sampled_from([2, 4, 6]), SIZES, st.booleans())
def test_rope_rows_interleaved(num_heads: int, head_dim: int, hidden: int, is_kv_after: bool) -> None:
    tensors = numbered({"q": (num_heads * head_dim, hidden), "v": (head_dim, hidden)})
    rows = rope_interleaved("q", heads("q", num_heads, head_dim, TpRank()), head_dim)
    expected = tensors["q"].reshape(num_heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(-1, hidden)
    one = block("q", (rows, hidden))
    if is_kv_after:
        one = block("qv", (joined(rows, whole(head_dim)), hidden))
        expected = np.concatenate([expected, tensors["v"]])
    np.testing.assert_array_equal(local_of(one, tensors), expected)


def test_rope_of_a_head_that_several_parts_make_up() -> None:
    tensors = numbered({"a": (1,), "b": (3,)})
    rows = rope_interleaved("q", joined(whole(1), whole(3)), 4)
    assert local_of(block("ab", (rows,)), tensors).tolist() == [0, 2, 1, 3]


def test_rope_of_anything_but_plain_heads_is_refused() -> None:
    for rows in (whole(6), padded("q", 7, 8, TpRank()), interleaved("q", whole(4), whole(4))):
        with pytest.raises(ManifestMismatch, match="not plain heads of 4"):
            rope_interleaved("q", rows, 4)
    with pytest.raises(ManifestMismatch, match="not plain heads of 3"):
        rope_interleaved("q", whole(6), 3)


@given(SIZES, SIZES, st.sampled_from([1, 2]), st.booleans())
def test_folded_parts_lie_in_one_checkpoint_tensor(per_group: int, head_dim: int, tp_size: int, is_rows: bool) -> None:
    """Gated attention: checkpoint q_proj per head [q; gate] (or row by row), trainer per group [gate, q, k, v]."""
    groups = 2
    num_q = groups * per_group
    tensors = numbered({"q_proj": (2 * num_q * head_dim, 3), "k": (groups * head_dim, 3), "v": (groups * head_dim, 3)})
    if is_rows:
        q, gate = tensors["q_proj"].reshape(-1, 2, 3).swapaxes(0, 1)
        host = interleaved("q_proj", whole(num_q * head_dim), whole(num_q * head_dim))
    else:
        q, gate = tensors["q_proj"].reshape(num_q, 2, head_dim, 3).swapaxes(0, 1)
        host = grouped("q_proj", 2 * num_q * head_dim, (head_dim, head_dim), num_q, TpRank())
    logical = [part.reshape(groups, -1, 3) for part in (gate, q, tensors["k"], tensors["v"])]
    fused = np.concatenate(logical, 1).reshape(-1, 3)
    for rank in range(tp_size):
        rows = [per_group * head_dim] * 2 + [head_dim] * 2
        dim = folded(grouped("qgkv", len(fused), rows, groups, TpRank(rank, tp_size)), (1, 0), host)
        one = block(("q_proj", "k", "v"), (dim, 3))
        np.testing.assert_array_equal(local_of(one, tensors), np.split(fused, tp_size)[rank])
    with pytest.raises(ManifestMismatch, match="do not lie in one of"):
        folded(joined(whole(3), whole(2)), (0, 1), host)


@st.composite
def fused_blocks(draw: st.DrawFn) -> tuple[Block, dict[str, Array], Array]:
    """A fused whole tensor as a block, its parts, and the same by numpy."""
    rows, hidden, experts = draw(SIZES), draw(SIZES), draw(st.integers(1, 3))
    names = [[f"{e}.gate", f"{e}.up"] for e in range(experts)]
    tensors = numbered({name: (rows, hidden) for pair in names for name in pair})
    pairs = [[tensors[name] for name in pair] for pair in names]
    parts = (whole(rows), whole(rows))
    match draw(st.sampled_from(["halves", "turns", "padded"])):
        case "halves":
            dim, arrays = joined(*parts), [np.concatenate(pair) for pair in pairs]
        case "turns":
            dim, arrays = interleaved("w", *parts), [np.stack(pair, 1).reshape(-1, hidden) for pair in pairs]
        case _:
            dim = joined(*(padded(n, rows, rows + 2, TpRank()) for n in "gu"))
            arrays = [np.concatenate([pad_rows(p, rows + 2) for p in pair]) for pair in pairs]
    blocks = [block(pair, (dim, hidden)) for pair in names]
    one, array = (stacked(blocks), np.stack(arrays)) if draw(st.booleans()) else (blocks[0], arrays[0])
    order = draw(st.permutations(range(array.ndim)))
    return one.transposed(order), tensors, np.ascontiguousarray(array.transpose(order))


@given(fused_blocks(), st.data())
def test_fused_blocks_cut_by_any_sharding(made: tuple[Block, dict[str, Array], Array], data: st.DataObject) -> None:
    one, tensors, array = made
    sharding = data.draw(shardings(array.ndim))
    back: dict[str, Array] = {}
    for rank in sharding.mesh.ranks:
        held = one.cut(cuts("w", array.shape, sharding, rank), local_shape("w", array.shape, sharding, rank))
        expected = distribute(array, sharding, rank)
        np.testing.assert_array_equal(local_of(held, tensors), expected)
        gather(holding_of(local=held), {"local": expected}, back)
    assert all((back[name] == tensors[name]).all() for name, _ in one.tensors), "the ranks together have it all"


@given(fused_blocks(), fused_blocks(), st.integers(0, 3), st.integers(1, 5))
def test_flat_buffers_cut_anywhere(
    one: tuple[Block, dict[str, Array], Array], other: tuple[Block, dict[str, Array], Array], gap: int, world: int
) -> None:
    """As FSDP1 and ZeRO-3 do: all parameters end to end with alignment, padded, cut into equal stretches."""
    tensors = {**{f"a.{n}": t for n, t in one[1].items()}, **{f"b.{n}": t + 1000 for n, t in other[1].items()}}
    blocks = [renamed(one[0], "a."), renamed(other[0], "b.")]
    arrays = [one[2], np.where(other[2] == OWN, OWN, other[2] + 1000)]
    second = arrays[0].size + gap
    flat = np.concatenate([arrays[0].ravel(), np.full(gap, OWN), arrays[1].ravel()])
    share = -(-len(flat) // world)
    flat = pad_rows(flat, share * world)
    for rank in range(world):
        start, stop = rank * share, (rank + 1) * share
        held = flattened([(0, blocks[0]), (second, blocks[1])], start, stop)
        np.testing.assert_array_equal(local_of(held, tensors), flat[start:stop])


def renamed(one: Block, prefix: str) -> Block:
    patches = tuple(type(p)(prefix + p.tensor, p.region, p.start, p.dims, p.steps) for p in one.patches)
    return Block(one.shape, tuple((prefix + n, shape) for n, shape in one.tensors), patches, one.padding)


def test_a_flattened_block_is_cut_no_more() -> None:
    flat = flattened([(0, block(["w"], (2, 3)))], 0, 6)
    with pytest.raises(ManifestMismatch, match="'w' is flattened already"):
        flattened([(0, flat)], 0, 3)


def test_scalars_and_empty_tensors_have_blocks() -> None:
    tensors = numbered({"scale": (), "none": (0, 3)})
    assert local_of(block(["scale"], ()), tensors).shape == ()
    assert local_of(flattened([(1, block(["scale"], ()))], 0, 3), tensors).tolist() == [OWN, 0, OWN]
    held = holding_of(none=block(["none"], (0, 3)))
    assert [spec.name for spec in held.tensors] == ["none"]
    assert fill(held, tensors)["none"].shape == (0, 3)


@given(st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_experts_where_the_map_puts_them(num_experts: int, num_ranks: int, is_linear: bool) -> None:
    """Two versions of the map, the second with a replica: each rank's stack has its experts in slot order."""
    tensors = numbered({f"experts.{e}.down_proj.weight": (3, 2) for e in range(num_experts)})
    make = OwnerMap.linear if is_linear else OwnerMap.round_robin
    first = make(num_experts, num_ranks)
    second = OwnerMap(num_experts, (*first.owned[:-1], (*first.owned[-1], 0)))
    for owners in (first, second):
        for owned in owners.owned:
            if not owned:
                continue
            one = stacked([block(expert_names("experts.down_proj", e), (3, 2)) for e in owned])
            expected = np.stack([tensors[f"experts.{e}.down_proj.weight"] for e in owned])
            np.testing.assert_array_equal(local_of(one, tensors), expected)


def scale_rows_needed(begin: int, extent: int, block_rows: int) -> list[int]:
    return sorted({row // block_rows for row in range(begin, begin + extent)})


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 5))
def test_scales_lie_where_rows_need_them(share: int, block_rows: int, tp_size: int) -> None:
    size = share * tp_size
    for rank in range(tp_size):
        rows = even("w", size, TpRank(rank, tp_size))
        needed = scale_rows_needed(rank * share, share, block_rows)
        tensors = numbered({"s": (-(-size // block_rows), 2)})
        overlapping = block("s", (scales("w", rows, block_rows, is_overlapping=True), 2))
        np.testing.assert_array_equal(local_of(overlapping, tensors), tensors["s"][needed])
        is_on_blocks = rank * share % block_rows == 0 and (share % block_rows == 0 or rank == tp_size - 1)
        if is_on_blocks:
            assert scales("w", rows, block_rows) == scales("w", rows, block_rows, is_overlapping=True)
        else:
            with pytest.raises(ManifestMismatch, match=r"'w' is of .* rows a block"):
                scales("w", rows, block_rows)


def test_scales_of_fused_rows() -> None:
    fused = scales("w", joined(whole(8), whole(6)), 4)
    assert fused == joined(whole(2), whole(2))
    unordered = Arrangement((6, 6), 12, (Run(1, 0, 6, 6), Run(0, 0, 6, 0)))
    tensors = numbered({"a": (2,), "b": (2,)})
    assert local_of(block("ab", (scales("w", unordered, 4, is_overlapping=True),)), tensors).tolist() == [0, 1, 2, 3]
    with pytest.raises(ManifestMismatch, match=r"rows 0:8 at 6 of the local do not lie on blocks"):
        scales("w", joined(whole(6), whole(8)), 4)
    for rows in (interleaved("w", whole(4), whole(4)), padded("w", 8, 12, TpRank())):
        with pytest.raises(ManifestMismatch, match="'w' is of 4 rows a block"):
            scales("w", rows, 4, is_overlapping=True)


@pytest.mark.parametrize(
    ("runs", "padding"),
    [
        ([Run(0, 0, 3, 0)], []),
        ([Run(0, 0, 4, 0), Run(0, 0, 1, 3)], []),
        ([Run(0, 0, 2, 0, 2)], [(1, 1)]),
        ([Run(0, 0, 2, 0), Run(0, 2, 2, 0)], []),
        ([Run(0, 3, 4, 0)], []),
        ([Run(0, 0, 4, 1)], []),
        ([Run(0, 0, 2, 0, 4)], [(1, 2)]),
        ([Run(0, 0, 4, 0), Run(0, 0, 0, 0)], []),
        ([Run(0, 0, 4, 0)], [(2, 2)]),
        ([Run(0, -2, 4, 0)], []),
        ([Run(-1, 0, 4, 0)], []),
        ([Run(1, 0, 4, 0)], []),
        ([Run(0, 0, 2, 0), Run(0, 2, 2, -2)], []),
        ([Run(0, 0, 4, 0, 0)], []),
        ([Run(0, 0, 4, 3, -1)], []),
    ],
)
def test_arrangements_that_do_not_fill_once_are_refused(
    runs: Sequence[Run], padding: Sequence[tuple[int, int]]
) -> None:
    with pytest.raises(ManifestMismatch, match=r"does not lie in|do not fill 4 rows once"):
        Arrangement((6,), 4, tuple(runs), tuple(padding))


def test_what_does_not_go_together_is_refused_by_name() -> None:
    with pytest.raises(ManifestMismatch, match="'w' has 5 rows, which 2 tensor-parallel ranks cannot share evenly"):
        even("w", 5, TpRank(0, 2))
    with pytest.raises(ManifestMismatch, match="'k' has 2 heads, which cannot be repeated evenly on 3"):
        kv_heads("k", 2, 1, TpRank(0, 3))
    with pytest.raises(ManifestMismatch, match="'k' has 3 heads, which 2 tensor-parallel ranks cannot share"):
        kv_heads("k", 3, 1, TpRank(0, 2))
    with pytest.raises(ManifestMismatch, match="'w' has 9 rows, more than the 8"):
        padded("w", 9, 8, TpRank())
    with pytest.raises(ManifestMismatch, match=r"'w' interleaves \[2, 3\] rows"):
        interleaved("w", whole(2), whole(3))
    with pytest.raises(ManifestMismatch, match=r"names \['q', 'k'\] do not suit parts of \[\[2, 2, 2\]\]"):
        block("qk", (joined(whole(2), whole(2), whole(2)),))
    with pytest.raises(ManifestMismatch, match="do not suit"):
        block("qq", (joined(whole(2), whole(2)),))
    with pytest.raises(ManifestMismatch, match="do not suit"):
        block("qk", (joined(whole(2), whole(2)), joined(whole(2), whole(2))))
    with pytest.raises(ManifestMismatch, match=r"shapes \[\(1,\), \(2,\)\] cannot be stacked"):
        stacked([block("a", (1,)), block("b", (2,))])
    with pytest.raises(ManifestMismatch, match=r"'mlp\.gate_up_proj' is no stacked expert tensor"):
        expert_names("mlp.gate_up_proj", 0)
    with pytest.raises(ManifestMismatch, match=r"'experts\.w1' is no stacked expert tensor"):
        expert_names("experts.w1", 0)
    with pytest.raises(ConfigError, match="tensor-parallel rank 2 of 2"):
        TpRank(2, 2)


def test_the_wire_may_have_another_dtype_than_the_local() -> None:
    builder = HoldingBuilder()
    block(["w"], (2,)).add(builder, "master", "float32", "bfloat16")
    held = builder.build()
    assert (held.tensors[0].dtype, held.locals[0].dtype, held.nbytes) == ("bfloat16", "float32", 4)


def test_regions_of_padding_are_boxes_of_the_local() -> None:
    one = block("w", (padded("w", 3, 8, TpRank(1, 2)), 2))
    assert one.shape == (4, 2)
    assert one.padding == (Region((0, 0), (4, 2)),)
    assert one.tensors == ()
    assert math.prod(one.shape) == one.padding[0].numel


def a_piece_of(tensor: str, local: str) -> None:
    builder = HoldingBuilder()
    builder.tensor("w", "float32", (2,))
    builder.local("l", "float32", (2,))
    builder.piece(tensor, Region((0,), (2,)), local, (0,))
    builder.build()


W23 = block(["w"], (2, 3))


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "a rank that is no integer": (lambda: TpRank(1.5, 2), "tensor-parallel rank 1.5 of 2"),  # type: ignore[arg-type]
    "a size that is no integer": (lambda: TpRank(0, 2.0), "tensor-parallel rank 0 of 2.0"),  # type: ignore[arg-type]
    "no part": (joined, "0 rows of parts of [] are no arrangement"),
    "a negative part": (lambda: padded("w", -1, 4, TpRank()), "4 rows of parts of [-1] are no arrangement"),
    "a negative dim": (lambda: block(["w"], (-2,)), "-2 rows of parts of [-2] are no arrangement"),
    "no query heads": (lambda: heads("q", 0, 8, TpRank()), "num_heads of 'q' is 0"),
    "query heads of no rows": (lambda: heads("q", 2, 0, TpRank()), "head_dim of 'q' is 0"),
    "no kv heads": (lambda: kv_heads("k", 0, 8, TpRank(0, 2)), "num_heads of 'k' is 0"),
    "negative kv heads": (lambda: kv_heads("k", -1, 8, TpRank(0, 2)), "num_heads of 'k' is -1"),
    "a multiple of 0": (lambda: vocab_padded(10, 0), "multiple of 'vocabulary' is 0"),
    "no groups": (lambda: grouped("qkv", 0, (2, 1, 1), 0, TpRank()), "num_heads of 'qkv' is 0"),
    "rope of heads of no rows": (lambda: rope_interleaved("q", whole(4), 0), "not plain heads of 0"),
    "scales of no rows a block": (lambda: scales("w", whole(4), 0), "block_rows of 'w' is 0"),
    "an unknown part folded": (lambda: folded(whole(4), (1,), whole(4)), "parts [1] of (4,) rows"),
    "a part from the end folded": (lambda: folded(whole(4), (-1,), whole(4)), "parts [-1] of (4,) rows"),
    "a part folded twice": (
        lambda: folded(joined(whole(4), whole(4)), (0, 0), joined(whole(4), whole(4))),
        "parts [0, 0] of (4, 4) rows",
    ),
    "too few dims transposed": (lambda: W23.transposed((0,)), "[0] is no order of the dims of [2, 3]"),
    "a dim transposed twice": (lambda: W23.transposed((1, 1)), "a block of ['w']"),
    "an unknown dim transposed": (lambda: W23.transposed((0, 2)), "[0, 2] is no order of the dims"),
    "one name stacked in two shapes": (
        lambda: stacked([block(["w"], (even("w", size, TpRank(0, size)),)) for size in (2, 3)]),
        "two shapes: [('w', (2,)), ('w', (3,))]",
    ),
    "flat blocks that overlap": (
        lambda: flattened([(5, W23), (0, block(["v"], (6,)))], 0, 12),
        "the block of ['w'] at 5 of a flat buffer begins before 6",
    ),
    "flat blocks that overlap on another rank": (
        lambda: flattened([(5, W23), (0, block(["v"], (6,)))], 8, 12),
        "the block of ['w'] at 5",
    ),
    "a flat block before the buffer": (lambda: flattened([(-1, W23)], 0, 5), "the block of ['w'] at -1"),
    "a flat stretch that ends before it starts": (lambda: flattened([(0, W23)], 4, 2), "elements 4:2 are no"),
    "a flat stretch before the buffer": (lambda: flattened([(0, W23)], -2, 2), "elements -2:2 are no"),
    "a piece of an unknown tensor": (lambda: a_piece_of("x", "l"), "tensor 'x' of the piece [0:2]"),
    "a piece in an unknown local": (lambda: a_piece_of("w", "m"), "local 'm' of the piece [0:2] of 'w'"),
    "a negative local": (lambda: LocalSpec("l", "float32", (-1,)), "local 'l' has a negative extent"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_is_refused_by_name(wrong: str) -> None:
    make, problem = WRONG[wrong]
    with pytest.raises(WsyncError, match=re.escape(problem)):
        make()


def test_an_empty_flat_block_overlaps_nothing() -> None:
    blocks = [(0, W23), (0, block(["none"], (0, 3))), (6, block(["end"], (0,)))]
    assert [name for name, _ in flattened(blocks, 0, 6).tensors] == ["w", "none", "end"]
