"""Cases from bug reports about layouts: each with its own input, and the right value made by plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from _reading import OWN, Array, fill, gather, holding_of, local_of, numbered
from test_sharding import assembled

from wsync.arrangements import (
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
from wsync.errors import ConfigError, ManifestMismatch
from wsync.holding import Region
from wsync.layouts import Block, block, expert_names, stacked
from wsync.sharding import Mesh, Partial, Replicate, Shard, Sharding, StridedShard, agreed_shape, cuts, global_shape

ONE = TpRank()


def moved(have: Block, local: Array, want: Block) -> Array:
    """The wanting side's local, by way of whole tensors."""
    tensors: dict[str, Array] = {}
    gather(holding_of(local=have), {"local": local}, tensors)
    return local_of(want, tensors)


@pytest.mark.parametrize(("hidden", "inter"), [(4, 3), (6, 3)])
def test_case_A07_experts_kept_transposed(hidden: int, inter: int) -> None:
    """w13 stored [E, H, 2I]; with H = 2I = 6 the shape says nothing, the layout does."""
    trainer = np.arange(2 * 2 * inter * hidden, dtype=np.int64).reshape(2, 2 * inter, hidden)
    rows = joined(whole(inter), whole(inter))
    have = stacked([block(expert_names("experts.gate_up_proj", e), (rows, hidden)) for e in range(2)])
    want = have.transposed((0, 2, 1))
    assert want.shape == (2, hidden, 2 * inter)
    np.testing.assert_array_equal(moved(have, trainer, want), trainer.swapaxes(1, 2))
    assert holding_of(w13=have).digest() != holding_of(w13=want).digest(), "the layout is part of what is compared"


@pytest.mark.parametrize("rest", [(), (4,)])
def test_case_A09_interleaved_gate_up(rest: tuple[int, ...]) -> None:
    """Rows g0, u0, g1, u1, g2, u2 to [gate; up]: the weight, the bias [6], and scales of blocks of 32 columns."""
    inter = 3
    turns, halves = interleaved("w", whole(inter), whole(inter)), joined(whole(inter), whole(inter))
    for name, columns in (("weight", rest), ("bias", ()), ("scale", (2,))):
        source = np.arange(2 * inter * int(np.prod(columns)), dtype=np.int64).reshape(2 * inter, *columns)
        names = (f"gate.{name}", f"up.{name}")
        result = moved(block(names, (turns, *columns)), source, block(names, (halves, *columns)))
        for i in range(inter):
            np.testing.assert_array_equal(result[i], source[2 * i])
            np.testing.assert_array_equal(result[inter + i], source[2 * i + 1])


def test_case_A09_interleaved_columns_of_stacked_experts_over_tensor_parallel() -> None:
    """The same as gpt-oss keeps it: [E, H, 2I], bias [E, 2I]; the engine holds [E, 2I, H] halves on TP2."""
    source = np.arange(2 * 5 * 8, dtype=np.int64).reshape(2, 5, 8)
    turns = interleaved("w", whole(4), whole(4))
    have = stacked([block((f"{e}.gate", f"{e}.up"), (turns, 5)) for e in range(2)]).transposed((0, 2, 1))
    for rank in range(2):
        share = even("w", 4, TpRank(rank, 2))
        want = stacked([block((f"{e}.gate", f"{e}.up"), (joined(share, share), 5)) for e in range(2)])
        gate, up = (source[:, :, p::2].swapaxes(1, 2)[:, 2 * rank : 2 * rank + 2] for p in (0, 1))
        np.testing.assert_array_equal(moved(have, source, want), np.concatenate([gate, up], 1))


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_case_A10_stacked_experts_have_per_expert_names(suffix: str) -> None:
    """Qwen3-30B-A3B: [128, 1536, 2048] is 256 tensors [768, 2048], [128, 2048, 768] is 128 tensors."""
    fused = f"model.layers.0.mlp.experts.gate_up_proj{suffix}"
    rows = joined(whole(768), whole(768))
    gate_up = stacked([block(expert_names(fused, e), (rows, 2048)) for e in range(128)])
    down = stacked([block(expert_names(f"experts.down_proj{suffix}", e), (2048, 768)) for e in range(128)])
    assert (gate_up.shape, down.shape) == ((128, 1536, 2048), (128, 2048, 768))
    assert {shape for _, shape in gate_up.tensors} == {(768, 2048)}
    kinds = ("gate_proj", "up_proj")
    names = [f"model.layers.0.mlp.experts.{e}.{kind}.weight" for e in range(128) for kind in kinds]
    assert [name for name, _ in gate_up.tensors] == names
    assert len(down.tensors) == 128
    starts = {patch.tensor: patch.start for patch in gate_up.patches}
    for e in range(128):
        assert [starts[names[2 * e]], starts[names[2 * e + 1]]] == [(e, 0, 0), (e, 768, 0)]
    held = holding_of(gate_up=gate_up, down=down)
    assert held.nbytes == 8 * (128 * 1536 * 2048 + 128 * 2048 * 768), "every element is somebody's"
    with pytest.raises(ManifestMismatch, match="is no stacked expert tensor that wsync knows"):
        expert_names("model.layers.0.mlp.experts.gate_up_proj_scale", 0)


def test_case_A11_transforms_are_pure() -> None:
    """One fused tensor [2, 6, 8] matched by the rules of w1 and of w3: the same as each on a fresh copy."""
    rows = joined(whole(3), whole(3))

    def fresh() -> Block:
        return stacked([block((f"{e}.w1", f"{e}.w3"), (rows, 8)) for e in range(2)])

    shared = fresh()
    before = holding_of(w=shared).digest()
    rules = [
        lambda one: one.transposed((0, 2, 1)),
        lambda one: one.cut(cuts("w", one.shape, Sharding(Mesh((2,), ("tp",)), (Shard(1),)), 1), (2, 3, 8)),
    ]
    for rule in rules * 2:
        assert rule(shared) == rule(fresh())
    assert holding_of(w=shared).digest() == before
    assert rules[0](rules[0](shared)) == shared


@pytest.mark.parametrize("hidden", [(), (3,)])
def test_case_A12_megatron_qkv_per_query_group(hidden: tuple[int, ...]) -> None:
    """4 q heads, 2 kv heads of dim 1, rows q0 q1 k0 v0 q2 q3 k1 v1; weights and bias vectors."""
    source = np.arange(8 * int(np.prod(hidden)), dtype=np.int64).reshape(8, *hidden)
    have = block("qkv", (grouped("linear_qkv", 8, (2, 1, 1), 2, ONE), *hidden))
    expected = {1: [[0, 1, 4, 5, 2, 6, 3, 7]], 2: [[0, 1, 2, 3], [4, 5, 6, 7]]}
    for tp_size, ranks in expected.items():
        for rank, rows in enumerate(ranks):
            tp = TpRank(rank, tp_size)
            fused = joined(heads("q", 4, 1, tp), kv_heads("k", 2, 1, tp), kv_heads("v", 2, 1, tp))
            np.testing.assert_array_equal(moved(have, source, block("qkv", (fused, *hidden))), source[rows])


def test_case_A13_gated_attention_has_four_segments() -> None:
    """One group of 8 q heads and 1 kv head of dim 256: 4608 = 2048 + 2048 + 256 + 256, in the order gate, q, k, v."""
    source = np.arange(4608, dtype=np.int64)
    dim = grouped("linear_qgkv", 4608, (2048, 2048, 256, 256), 1, ONE)
    tensors: dict[str, Array] = {}
    gather(holding_of(local=block(("gate", "q", "k", "v"), (dim,))), {"local": source}, tensors)
    got = {name: (int(tensor[0]), int(tensor[-1])) for name, tensor in tensors.items()}
    assert got == {"gate": (0, 2047), "q": (2048, 4095), "k": (4096, 4351), "v": (4352, 4607)}
    with pytest.raises(
        ManifestMismatch, match=r"'linear_qgkv' has 4608 rows, but 1 groups of \[2048, 256, 256\] are 2560"
    ):
        grouped("linear_qgkv", 4608, (2048, 256, 256), 1, ONE)


def test_case_A13_gate_rows_lie_in_the_checkpoints_q_proj() -> None:
    """16 q heads, 2 kv heads of dim 256: q_proj has for each head 256 query rows, then 256 gate rows."""
    host = grouped("q_proj", 8192, (256, 256), 16, ONE)
    dim = folded(grouped("linear_qgkv", 9216, (2048, 2048, 256, 256), 2, ONE), (1, 0), host)
    one = block(("q_proj", "k_proj", "v_proj"), (dim,))
    assert dict(one.tensors) == {"q_proj": (8192,), "k_proj": (512,), "v_proj": (512,)}
    tensors = numbered(dict(one.tensors))
    q, gate = tensors["q_proj"].reshape(16, 2, 256).swapaxes(0, 1)
    parts = [part.reshape(2, -1) for part in (gate, q, tensors["k_proj"], tensors["v_proj"])]
    np.testing.assert_array_equal(local_of(one, tensors), np.concatenate(parts, 1).ravel())


def test_case_A14_packed_components_are_cut_one_by_one() -> None:
    """[Q|K|V|Z|b|a] of 5152 rows on TP2: the even cut at 2576 falls inside V."""
    sizes = {"Q": 512, "K": 512, "V": 2048, "Z": 2048, "b": 16, "a": 16}
    tensors = numbered({name: (size,) for name, size in sizes.items()})
    packed = np.concatenate(list(tensors.values()))
    assert packed.size == 5152
    assert packed[2576] in tensors["V"]
    have = block(tuple(sizes), (joined(*(whole(size) for size in sizes.values())),))
    for rank in range(2):
        dim = joined(*(even(name, size, TpRank(rank, 2)) for name, size in sizes.items()))
        expected = np.concatenate([np.split(tensor, 2)[rank] for tensor in tensors.values()])
        np.testing.assert_array_equal(moved(have, packed, block(tuple(sizes), (dim,))), expected)
    with pytest.raises(ManifestMismatch, match="'b' has 16 rows, which 3"):
        even("b", 16, TpRank(0, 3))


@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "tp_size", "kv_of_rank"),
    [
        (16, 2, 256, 4, [0, 0, 1, 1]),
        (16, 2, 256, 8, [0, 0, 0, 0, 1, 1, 1, 1]),
        (4, 2, 1, 4, [0, 0, 1, 1]),
        (4, 2, 1, 2, [0, 1]),
    ],
)
def test_case_A15_kv_heads_are_repeated(
    num_q: int, num_kv: int, head_dim: int, tp_size: int, kv_of_rank: list[int]
) -> None:
    tensors = numbered({"q": (num_q * head_dim, 1), "k": (num_kv * head_dim, 1), "v": (num_kv * head_dim, 1)})
    own = num_q // tp_size * head_dim
    replicas: dict[int, Array] = {}
    for rank, head in enumerate(kv_of_rank):
        tp = TpRank(rank, tp_size)
        dim = joined(
            heads("q", num_q, head_dim, tp), kv_heads("k", num_kv, head_dim, tp), kv_heads("v", num_kv, head_dim, tp)
        )
        local = local_of(block("qkv", (dim, 1)), tensors)
        np.testing.assert_array_equal(local[:own], tensors["q"][rank * own : (rank + 1) * own])
        expected = [tensors[n][head * head_dim : (head + 1) * head_dim] for n in "kv"]
        np.testing.assert_array_equal(local[own:], np.concatenate(expected))
        np.testing.assert_array_equal(local[own:], replicas.setdefault(head, local[own:]))


def test_case_A15_indivisible_query_heads_are_refused_by_name() -> None:
    with pytest.raises(
        ManifestMismatch, match=r"'layers\.0\.q_proj' has 14 heads, which 4 tensor-parallel ranks cannot"
    ):
        heads("layers.0.q_proj", 14, 64, TpRank(0, 4))


def test_case_A16_a_norm_per_head_is_cut_by_heads() -> None:
    """k_norm [8 * 128] on TP16: rank r holds head r // 2, all its 128 values."""
    tensors = numbered({"k_norm": (8 * 128,)})
    for rank in range(16):
        local = local_of(block(["k_norm"], (kv_heads("k_norm", 8, 128, TpRank(rank, 16)),)), tensors)
        np.testing.assert_array_equal(local, tensors["k_norm"].reshape(8, 128)[rank // 2])


@pytest.mark.parametrize(
    ("vocab", "tp_size", "total", "share", "last"),
    [(32001, 2, 32064, 16032, 15969), (128262, 8, 128320, 16040, 15982), (49155, 2, 49216, 24608, 24547)],
)
def test_case_A17_padded_vocabulary(vocab: int, tp_size: int, total: int, share: int, last: int) -> None:
    assert vocab_padded(vocab) == total
    tensors = numbered({"embed": (vocab, 1)})
    for rank in range(tp_size):
        one = block(["embed"], (padded("embed", vocab, total, TpRank(rank, tp_size)), 1))
        real = last if rank == tp_size - 1 else share
        assert one.shape == (share, 1)
        assert sum(patch.region.numel for patch in one.patches) == real, "real rows only"
        assert one.padding == ((Region((real, 0), (share - real, 1)),) if real < share else ())
        np.testing.assert_array_equal(local_of(one, tensors)[:real], tensors["embed"][rank * share :][:real])


def test_case_A17_trainer_padded_otherwise_than_the_engine() -> None:
    """Trainer 151936 + 128 rows on TP2, engine 151936 on TP2 and on TP4: the pad rows never travel."""
    vocab = 151936
    tensors: dict[str, Array] = {}
    trainer = np.concatenate([np.arange(vocab, dtype=np.int64), np.full(128, -7)]).reshape(2, -1)
    for rank in range(2):
        have = block(["embed"], (padded("embed", vocab, vocab + 128, TpRank(rank, 2)),))
        gather(holding_of(local=have), {"local": trainer[rank]}, tensors)
    for tp_size in (2, 4):
        for rank in range(tp_size):
            want = block(["embed"], (padded("embed", vocab, vocab_padded(vocab), TpRank(rank, tp_size)),))
            assert want.padding == ()
            np.testing.assert_array_equal(local_of(want, tensors), np.split(np.arange(vocab), tp_size)[rank])


def test_case_A34_strided_shards_are_put_back_in_order() -> None:
    """dim0 = 4 on dp2 x tp2: ranks hold [0], [2], [1], [3]. Against torch itself in test_sharding_torch.py."""
    sharding = Sharding(Mesh((2, 2), ("dp", "tp")), (StridedShard(0, 2), Shard(0)))
    one = block(["w"], (4,))
    whole_again: dict[str, Array] = {}
    for rank, row in enumerate([0, 2, 1, 3]):
        local = assembled(np.arange(4), sharding, rank)
        assert local.tolist() == [row]
        held = holding_of(local=one.cut(cuts("w", (4,), sharding, rank), (1,)))
        gather(held, {"local": local}, whole_again)
    assert whole_again["w"].tolist() == [0, 1, 2, 3]


def test_case_A36_the_global_shape_is_agreed() -> None:
    """Locals of 3 and 2: 5 on all; from_local alone would have said 6 on one rank and 4 on the other."""
    sharding = Sharding(Mesh((2,), ("dp",)), (Shard(0),))
    assert global_shape("w", {0: (3,), 1: (2,)}, sharding) == (5,)
    assert agreed_shape("w", {0: (5,), 1: (5,)}) == (5,)
    with pytest.raises(ManifestMismatch, match=r"'w' is not agreed: \[6\] by ranks \[0\], \[4\] by ranks \[1\]"):
        agreed_shape("w", {0: (6,), 1: (4,)})


def test_case_A37_a_summand_is_no_weight() -> None:
    sharding = Sharding(Mesh((2,), ("dp",)), (Partial(),))
    with pytest.raises(ManifestMismatch, match=r"'layers\.0\.w' is Partial\(sum\) on mesh axis 'dp'"):
        cuts("layers.0.w", (4,), sharding, 0)


def test_case_A53_a_part_follows_from_the_place_in_the_mesh() -> None:
    """Two engines of TP2, global ranks 0..3, devices permuted: rank 3 is the second engine's first."""
    mesh = Mesh((2, 2), ("engine", "tp"), (1, 0, 3, 2))
    assert [mesh.coordinate(rank) for rank in range(4)] == [(0, 1), (0, 0), (1, 1), (1, 0)]
    sharding = Sharding(mesh, (Replicate(), Shard(0)))
    rows = [assembled(np.arange(4), sharding, rank).tolist() for rank in range(4)]
    assert rows == [[2, 3], [0, 1], [2, 3], [0, 1]]
    with pytest.raises(ConfigError, match=r"rank 4 is not in the mesh of ranks \[1, 0, 3, 2\]"):
        cuts("w", (4,), sharding, 4)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_case_A54_an_expert_dim_is_padded_with_the_members_own_zeros(tp_size: int) -> None:
    """wo [H, 704] kept as [H, 1024]: 320 columns are padding and nothing is repeated into them."""
    tensors = numbered({"wo": (3, 704)})
    expected = np.pad(tensors["wo"], ((0, 0), (0, 320)), constant_values=OWN)
    for rank in range(tp_size):
        one = block(["wo"], (3, padded("wo", 704, 1024, TpRank(rank, tp_size))))
        np.testing.assert_array_equal(local_of(one, tensors), np.split(expected, tp_size, 1)[rank])
    assert one.padding == (Region((0, 704 - 512 * (tp_size - 1)), (3, 320)),)


def test_case_A54_rope_rows_are_permuted_as_declared() -> None:
    """head_dim 4: rotate-half rows x0 x1 y0 y1 lie as x0 y0 x1 y1, head by head, and back."""
    source = np.arange(8, dtype=np.int64)
    halves = heads("q", 2, 4, ONE)
    have, want = block("q", (halves,)), block("q", (rope_interleaved("q", halves, 4),))
    result = moved(have, source, want)
    assert result.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert moved(want, result, have).tolist() == source.tolist()


@pytest.mark.parametrize(("size", "tp_size", "share"), [(1408, 8, 176), (768, 4, 192)])
def test_case_A55_scales_of_blocks_that_the_cut_goes_through(size: int, tp_size: int, share: int) -> None:
    """Refused by name, or overlapping scale rows: the scale of global row r is r // 128."""
    tensors = numbered({"scale": (-(-size // 128), 2)})
    for rank in range(tp_size):
        rows = even("w13", size, TpRank(rank, tp_size))
        assert rows.extent == share
        with pytest.raises(ManifestMismatch, match=r"the scale of 'w13' is of 128 rows a block"):
            scales("w13", rows)
        local = local_of(block(["scale"], (scales("w13", rows, is_overlapping=True), 2)), tensors)
        first = rank * share // 128
        for row in range(rank * share, (rank + 1) * share):
            np.testing.assert_array_equal(local[row // 128 - first], tensors["scale"][row // 128])
        assert first + len(local) - 1 == (rank * share + share - 1) // 128, "and no row more"


def test_case_A55_the_last_block_may_be_short() -> None:
    """kv_a of 576 rows has 5 scale rows (4.5 blocks); behind q_a's 1536 rows it still lies on blocks."""
    fused = scales("fused_qkv_a", joined(whole(1536), whole(576)))
    assert (fused.sizes, fused.extent) == ((12, 5), 17)
    assert fused == joined(whole(12), whole(5))
    with pytest.raises(ManifestMismatch, match="rows 0:1536 at 576 of the local do not lie on blocks"):
        scales("fused", joined(whole(576), whole(1536)))


def test_several_locals_of_a_model_in_one_holding() -> None:
    """A tied, padded vocabulary and a fused layer together; each local is filled and covered by itself."""
    tp = TpRank(1, 2)
    held = holding_of(
        embed=block(["embed"], (padded("embed", 5, 8, tp), 2)),
        qkv=block("qkv", (joined(heads("q", 2, 2, tp), kv_heads("k", 1, 2, tp), kv_heads("v", 1, 2, tp)), 2)),
    )
    tensors = numbered({spec.name: spec.shape for spec in held.tensors})
    filled = fill(held, tensors)
    assert filled["embed"].tolist() == [tensors["embed"][4].tolist(), [OWN, OWN], [OWN, OWN], [OWN, OWN]]
    np.testing.assert_array_equal(filled["qkv"], np.concatenate([tensors["q"][2:], tensors["k"], tensors["v"]]))
