"""What one rank reads of its own tensors, however its framework has cut them. No second process takes part.

Ranks of a mesh are played one after another by torch's fake process group, in which nothing is ever sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from wsync import sharding  # noqa: E402
from wsync.arrangements import TpRank, heads, joined, kv_heads  # noqa: E402
from wsync.errors import ConfigError, ManifestMismatch  # noqa: E402
from wsync.integrations.sharded import Held, placed, read_state  # noqa: E402
from wsync.layouts import block  # noqa: E402


def assemble(ranks: Sequence[Held]) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor from the pieces of all ranks; each element has to be there, and the same wherever it is."""
    whole: dict[str, np.ndarray[Any, Any]] = {}
    there: dict[str, np.ndarray[Any, Any]] = {}
    for held in ranks:
        for piece in held.holding.pieces:
            spec, local = held.holding.tensors[piece.tensor], held.holding.locals[piece.place.local]
            tensor = held.locals[local.name]
            assert tuple(tensor.shape) == local.shape
            assert str(tensor.dtype) == f"torch.{local.dtype}"
            offset, strides = piece.place.strided(tensor.stride())
            view = torch.as_strided(tensor, piece.region.extent, strides, tensor.storage_offset() + offset)
            box = tuple(slice(o, o + e) for o, e in zip(piece.region.offset, piece.region.extent, strict=True))
            if spec.name not in whole:
                whole[spec.name] = np.zeros(spec.shape, view.numpy().dtype)
                there[spec.name] = np.zeros(spec.shape, bool)
            old, is_old = whole[spec.name][box], there[spec.name][box]
            assert (old == view.numpy())[is_old].all(), f"ranks differ in {spec.name}{piece.region}"
            whole[spec.name][box] = view.numpy()
            there[spec.name][box] = True
    assert all(known.all() for known in there.values())
    return whole


def on_ranks(count: int, read: Callable[[int], Held]) -> list[Held]:
    """`read(rank)` as each rank of a world of `count`."""
    found = []
    for rank in range(count):
        dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
        try:
            found.append(read(rank))
        finally:
            dist.destroy_process_group()
    return found


def values(*shape: int) -> Any:
    return torch.arange(float(np.prod(shape, dtype=int))).reshape(shape)


# --- whole tensors


def test_a_tensor_in_odd_memory_is_read_where_it_lies() -> None:
    root = values(6, 8)
    source = {
        "transposed": root.t(),
        "strided": root[::2, 1::3],
        "expanded": values(3, 1).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "int8": torch.tensor(7, dtype=torch.int8),
        "last": values(2, 3, 2).contiguous().permute(2, 0, 1),
    }
    held = read_state(source)
    whole = assemble([held])
    for name, tensor in source.items():
        assert np.array_equal(whole[name], tensor.numpy())
        assert whole[name].shape == tuple(tensor.shape)
        assert held.locals[name].data_ptr() == tensor.data_ptr()
    root.mul_(-1)
    assert np.array_equal(assemble([held])["transposed"], root.t().numpy())


def test_case_A29_a_slice_of_a_root_is_one_piece() -> None:
    root = values(1024, 1024)
    held = read_state({"w": root[:, 0:64]})
    assert len(held.holding.pieces) == 1
    assert held.holding.locals[0].shape == (1024, 64)
    assert np.array_equal(assemble([held])["w"], root[:, 0:64].numpy())


def test_a_tensor_without_elements_is_declared_and_needs_no_memory() -> None:
    held = read_state({"none": torch.empty(0, 4), "w": values(2)})
    assert {spec.name: spec.shape for spec in held.holding.tensors} == {"none": (0, 4), "w": (2,)}
    assert list(held.locals) == ["w"]


def test_case_A26_a_tensor_travels_in_its_own_dtype() -> None:
    bias = torch.tensor([512.0, 511.0, 510.0, 509.0])
    held = read_state({"gate.e_score_correction_bias": bias, "w": values(4).bfloat16()})
    assert {spec.name: spec.dtype for spec in held.holding.tensors} == {
        "gate.e_score_correction_bias": "float32", "w": "bfloat16",
    }  # fmt: skip
    assert bias.bfloat16().tolist() == [512.0, 512.0, 510.0, 508.0]  # what a blanket cast would have made of it


def test_case_A27_another_wire_dtype_is_declared_and_the_live_tensor_stays() -> None:
    source = {"a": values(4), "b": values(4).half(), "c": values(4).bfloat16()}
    held = read_state(source, dtypes={"a": "bfloat16", "b": "bfloat16"})
    assert [spec.dtype for spec in held.holding.tensors] == ["bfloat16"] * 3
    assert [local.dtype for local in held.holding.locals] == ["float32", "float16", "bfloat16"]
    with pytest.raises(ConfigError, match="names tensors that are not there: d"):
        read_state(source, dtypes={"d": "bfloat16"})
    for wrong, hint in (("int8", "as it is"), ("bf16", "bfloat16, .*float32"), ("nn", "bfloat16"), ("half", "float16")):
        with pytest.raises(ConfigError, match=f"'a' is float32 and cannot travel as '{wrong}'.*{hint}"):
            read_state(source, dtypes={"a": wrong})


def test_a_wire_dtype_may_be_a_dtype() -> None:
    source = {"weight": values(4)}
    assert read_state(source, dtypes={"weight": torch.bfloat16}).holding == (
        read_state(source, dtypes={"weight": "bfloat16"}).holding
    )
    for wrong, hint in ((torch.int8, "as it is"), (torch.qint8, "bfloat16, .*float32")):
        with pytest.raises(ConfigError, match=f"cannot travel as '{str(wrong)[6:]}'.*{hint}"):
            read_state(source, dtypes={"weight": wrong})


def test_a_misspelt_name_is_told_what_is_there() -> None:
    with pytest.raises(ConfigError, match=r"not there: wieght.*; instead of 'wieght' there is 'weight'$"):
        read_state({"weight": values(4), "bias": values(4)}, dtypes={"wieght": torch.bfloat16})


def test_ranks_are_whole_numbers_from_zero() -> None:
    from wsync import ShardPublisher

    held = read_state({"weight": values(4)})
    bad: list[tuple[Any, Any, str]] = [
        ("1", 2, "rank='1' is no whole number"),
        (1, "2", "num_ranks='2' is no whole number"),
        (None, 2, "rank=None is no whole number"),
        (0.0, 2, "rank=0.0 is no whole number"),
        (2, 2, "rank 2 is none of 2 ranks.*ranks count from 0"),
        (-1, 2, "rank -1 is none of 2 ranks"),
    ]
    for rank, num_ranks, text in bad:
        with pytest.raises(ConfigError, match=text):
            ShardPublisher("policy", held.holding, held.locals, rank=rank, num_ranks=num_ranks)


def test_case_A33_memory_that_is_not_there_is_refused_by_name() -> None:
    gone = values(4, 4)
    gone.untyped_storage().resize_(0)
    with pytest.raises(ManifestMismatch, match="the storage of 'w' has been freed"):
        read_state({"w": gone})
    with pytest.raises(ManifestMismatch, match="'w' is on the meta device"):
        read_state({"w": torch.empty(2, 2, device="meta")})
    layout = placed("w", (8, 4), sharding.Sharding(sharding.Mesh((2,), ("tp",)), (sharding.Shard(0),)), 1)
    with pytest.raises(ManifestMismatch, match=r"this rank's part of 'w' is \[0\], but its layout says \[4, 4\]"):
        read_state({"w": torch.empty(0)}, layouts={"w": layout})


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ManifestMismatch, match="'step' is a int"):
        read_state({"step": 3, "w": values(2)})
    with pytest.raises(ManifestMismatch, match="'s' is sparse"):
        read_state({"s": values(2, 2).to_sparse()})
    with pytest.raises(ConfigError, match="cannot read tensors from a list"):
        read_state([values(2)])  # type: ignore[arg-type]
    assert list(read_state({"step": 3, "w": values(2)}, names=["w"]).locals) == ["w"]


# --- modules


class Odd(torch.nn.Module):
    """All kinds of tensors that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.register_buffer("counts", values(3))
        self.register_buffer("inv_freq", values(2), persistent=False)
        self.scale = values(5)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 1}


def test_case_A24_every_tensor_of_a_module_is_published_or_reported() -> None:
    held = read_state(torch.nn.ModuleDict({"module": Odd()}))
    assert [spec.name for spec in held.holding.tensors] == ["counts", "embed.weight", "head.weight"]
    assert {name: reason.split(":")[0].split(",")[0] for name, reason in held.left_out.items()} == {
        "inv_freq": "non-persistent buffer",
        "scale": "plain attribute",
        "_extra_state": "extra state of a module",
    }


def test_case_A01_a_tie_is_one_payload_with_two_names() -> None:
    module = Odd()
    module.head.weight = module.embed.weight
    held = read_state(module)
    specs = {spec.name: spec for spec in held.holding.tensors}
    assert specs["head.weight"].alias_of == "embed.weight"
    assert specs["head.weight"].shape == (8, 4)
    assert "head.weight" not in held.locals
    assert len(held.holding.pieces) == 2
    assert read_state(module, names=["head.weight"]).holding.tensors[0].alias_of == ""


def test_case_A02_equal_values_in_other_memory_are_not_tied() -> None:
    embed = values(8, 4)
    held = read_state(
        {"embed.weight": embed, "lm_head.weight": embed.detach(), "mtp.lm_head.weight": embed.clone(), "t": embed.t()}
    )
    assert {spec.name: spec.alias_of for spec in held.holding.tensors} == {
        "embed.weight": "", "mtp.lm_head.weight": "", "t": "", "lm_head.weight": "embed.weight",
    }  # fmt: skip


def test_case_A03_ties_come_from_memory_and_have_one_dtype() -> None:
    module = Odd()
    module.config = SimpleNamespace(tie_word_embeddings=True)
    assert all(not spec.alias_of for spec in read_state(module).holding.tensors)
    module.head.weight = module.embed.weight
    with pytest.raises(
        ManifestMismatch, match=r"'head.weight' is tied to 'embed.weight', but is to travel as bfloat16"
    ):
        read_state(module, dtypes={"head.weight": "bfloat16"})
    held = read_state(module, dtypes={"head.weight": "bfloat16", "embed.weight": "bfloat16"})
    assert held.holding.tensors[-1].alias_of == "embed.weight"


def test_wrapped_names_are_read_plain_and_collisions_are_refused() -> None:
    held = read_state({"module._orig_mod.a.weight": values(2), "b.weight": values(2)})
    assert list(held.locals) == ["a.weight", "b.weight"]
    with pytest.raises(ManifestMismatch, match=r"'module.a' and 'a'"):
        read_state({"module.a": values(2), "a": values(2)})


# --- DTensor


def from_local(local: Any, mesh: Any, placements: Sequence[Any], shape: Sequence[int] | None = None) -> Any:
    sizes: Mapping[str, Any] = {}
    if shape is not None:
        sizes = {"shape": torch.Size(shape), "stride": torch.empty(*shape, device="meta").stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **sizes)


def test_case_A34_fsdp_inside_a_shard_is_read_in_the_order_of_the_tensor() -> None:
    rows = [[0.0], [2.0], [1.0], [3.0]]

    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return read_state({"w": from_local(torch.tensor(rows[rank]), mesh, placements, (4,))})

    assert assemble(on_ranks(4, read))["w"].tolist() == [0, 1, 2, 3]


def test_case_A34_a_strided_local_of_several_runs_on_two_dims() -> None:
    """(dp, tp) = (2, 2) with the strided shard alone: every rank has several runs of rows, and columns of its own."""
    full = values(12, 6)

    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = divmod(rank, 2)
        mine = torch.cat([block[3 * dp : 3 * dp + 3] for block in full.split(6)])[:, 3 * tp : 3 * tp + 3]
        return read_state({"w": from_local(mine.clone(), mesh, [_StridedShard(0, split_factor=2), Shard(1)], (12, 6))})

    found = on_ranks(4, read)
    assert len(found[0].holding.pieces) == 2
    assert np.array_equal(assemble(found)["w"], full.numpy())


@pytest.mark.parametrize("is_nested", [True, False])
def test_case_A34_an_uneven_shard_of_a_shard_is_read_as_it_is(is_nested: bool) -> None:
    """9 rows on dp 4 x tp 2: what `fully_shard` cuts, and what the placements say, differ on some ranks."""
    mesh = sharding.Mesh((4, 2), ("dp", "tp"))
    way = sharding.Sharding(mesh, (sharding.StridedShard(0, 2), sharding.Shard(0)))
    way = way.nested() if is_nested else way
    shapes = []

    def read(rank: int) -> Held:
        rows = [
            row for cut in sharding.cuts("w", (9,), way, rank) for row in range(cut.region.offset[0], *cut.region.end)
        ]
        shapes.append(len(rows))
        live = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        return read_state(
            {"w": from_local(torch.tensor(rows), live, [_StridedShard(0, split_factor=2), Shard(0)], (9,))}
        )

    assert assemble(on_ranks(8, read))["w"].tolist() == list(range(9))
    assert shapes == ([2, 1, 2, 1, 1, 1, 0, 1] if is_nested else [2, 1, 2, 1, 1, 1, 1, 0])


def test_case_A34_a_shard_that_can_be_read_in_two_ways_is_refused() -> None:
    """27 rows on dp 3 x tp 4: rank 10 has one row; `fully_shard` gives it row 20, the placements say 26."""

    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("dp", "tp"))
        local = values(1) if rank == 10 else values(0)
        placements = [_StridedShard(0, split_factor=4), Shard(0)]
        return read_state({"w": from_local(local, mesh, placements, (27,))} if rank == 10 else {"b": values(1)})

    with pytest.raises(ManifestMismatch, match=r"'w' \[27\] is cut unevenly"):
        on_ranks(12, read)


@pytest.mark.parametrize("shape", [(5, 3), (4, 2), (1, 7), (3,)])
def test_uneven_and_empty_shards_have_the_global_shape_of_their_spec(shape: tuple[int, ...]) -> None:
    full = values(*shape)

    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (4,))
        chunks = [*full.chunk(4), *[full[:0]] * 4]
        return read_state({"w": from_local(chunks[rank].clone(), mesh, [Shard(0)], shape), "other": values(2)})

    found = on_ranks(4, read)
    assert np.array_equal(assemble(found)["w"], full.numpy())
    for held in found:  # a rank without an element of it does not speak of it
        is_there = "w" in held.locals
        assert ("w" in [spec.name for spec in held.holding.tensors]) == is_there


def test_a_local_without_elements_may_have_any_shape() -> None:
    """Where tensor parallelism leaves a rank no columns, `fully_shard` makes a local of (0, 0)."""
    full = values(3, 2)

    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (4,))
        local = full[:, rank : rank + 1].clone() if rank < 2 else torch.empty(0, 0)
        return read_state({"w": from_local(local, mesh, [Shard(1)], (3, 2)), "other": values(2)})

    assert np.array_equal(assemble(on_ranks(4, read))["w"], full.numpy())


def test_case_A36_each_rank_records_the_shape_that_it_believes_in() -> None:
    def guessed(rank: int) -> Held:
        local = values(3 - rank)
        return read_state({"w": from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)])})

    def told(rank: int) -> Held:
        local = values(5)[3 * rank : 3 * rank + 3].clone()
        return read_state({"w": from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], (5,))})

    claims = {rank: held.holding.tensors[0].shape for rank, held in enumerate(on_ranks(2, guessed))}
    assert claims == {0: (6,), 1: (4,)}
    with pytest.raises(ManifestMismatch, match="the global shape of 'w' is not agreed"):
        sharding.agreed_shape("w", claims)
    assert np.array_equal(assemble(on_ranks(2, told))["w"], values(5).numpy())


def test_case_A36_a_local_that_does_not_suit_its_global_shape_is_refused() -> None:
    def read(rank: int) -> Held:
        return read_state({"w": from_local(values(2 + rank), init_device_mesh("cpu", (2,)), [Shard(0)], (5,))})

    with pytest.raises(ManifestMismatch, match=r"this rank's part of 'w' is \[2\], but its layout says \[3\]"):
        on_ranks(2, read)


def test_case_A37_a_summand_is_refused_by_name() -> None:
    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (2,))
        return read_state({"w": from_local(torch.full((4,), 1.0 + rank), mesh, [Partial()])})

    with pytest.raises(ManifestMismatch, match="'w' has the placement P"):
        on_ranks(2, read)


def test_a_replicated_dim_of_a_mesh_gives_every_rank_the_same() -> None:
    full = values(6, 2)

    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (2, 2))
        local = full[3 * (rank % 2) : 3 * (rank % 2) + 3].clone()
        return read_state({"w": from_local(local, mesh, [Replicate(), Shard(0)], (6, 2))})

    found = on_ranks(4, read)
    assert found[0].holding == found[2].holding != found[1].holding
    assert np.array_equal(assemble(found)["w"], full.numpy())


def test_case_A01_a_sharded_tie_is_a_tie() -> None:
    def read(rank: int) -> Held:
        mesh = init_device_mesh("cpu", (4,))
        local = [*values(3, 2).chunk(3), values(3, 2)[:0]][rank]  # no row on the last rank
        locals_ = {"embed": local, "head": local, "copy": local.clone()}
        return read_state({name: from_local(mine, mesh, [Shard(0)], (3, 2)) for name, mine in locals_.items()})

    for rank, held in enumerate(on_ranks(4, read)):
        ties = {spec.name: spec.alias_of for spec in held.holding.tensors}
        assert ties == ({"copy": "", "embed": "", "head": "embed"} if rank < 3 else {})


# --- other frameworks


class Group:
    """What ZeRO-3 keeps of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def zero3(full: Any, rank: int, size: int) -> Any:
    """A partitioned parameter: no data of its own, an equal run of the flattened tensor, padded at the end."""
    each = -(-full.numel() // size)
    padded = torch.cat([full.reshape(-1), torch.full((each * size - full.numel(),), -1.0)])
    param = torch.nn.Parameter(torch.empty(0))
    param.ds_id, param.ds_shape, param.ds_process_group = 0, full.shape, Group(rank, size)
    param.ds_tensor = padded[each * rank : each * (rank + 1)].clone()
    return param


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 5), (1, 2)])
def test_zero3_partitions_are_runs_of_the_flattened_tensor(shape: tuple[int, ...], size: int) -> None:
    full = values(*shape)
    found = [read_state({"w": zero3(full, rank, size), "b": values(2)}) for rank in range(size)]
    assert np.array_equal(assemble(found)["w"], full.numpy())
    for held in found:
        for local in held.holding.locals:
            padding = sum(region.numel for region in local.padding)
            assert padding == (held.locals[local.name] == -1).sum()


def test_case_A33_a_partition_that_is_swapped_out_is_refused() -> None:
    param = zero3(values(4, 4), 0, 2)
    param.ds_tensor = torch.empty(0)
    with pytest.raises(ManifestMismatch, match=r"'w' \[4, 4\] is cut over 2 ranks, but this one has 0 elements"):
        read_state({"w": param})


def megatron(local: Any, dim: int, stride: int = 1) -> Any:
    param = torch.nn.Parameter(local.clone())
    param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
    return param


def test_megatrons_attributes_say_how_a_parameter_is_cut() -> None:
    full = values(8, 6)

    def read(rank: int) -> Held:
        rows, columns = slice(4 * rank, 4 * rank + 4), slice(3 * rank, 3 * rank + 3)
        # With a stride of 2 a rank has its part of the first half, then its part of the second.
        halves = torch.cat([half[2 * rank : 2 * rank + 2] for half in full.split(4)])
        norm = torch.nn.Parameter(values(6))
        norm.tensor_model_parallel, norm.partition_dim, norm.partition_stride = False, -1, 1
        source = {"up": megatron(full[rows], 0), "down": megatron(full[:, columns], 1)}
        return read_state(source | {"glu": megatron(halves, 0, 2), "norm": norm}, tp=(rank, 2))

    whole = assemble([read(0), read(1)])
    assert all(np.array_equal(whole[name], full.numpy()) for name in ("up", "down", "glu"))
    assert whole["norm"].shape == (6,)
    with pytest.raises(ManifestMismatch, match=r"'up' is a tensor-parallel shard \(partition_dim 0\)"):
        read_state({"up": megatron(full[:4], 0)})
    with pytest.raises(ConfigError, match=r"tp=\(2, 2\) is no"):
        read_state({"up": megatron(full[:4], 0)}, tp=(2, 2))


def test_a_declared_layout_says_what_a_plain_tensor_is_a_shard_of() -> None:
    full = values(5, 6)
    way = sharding.Sharding(sharding.Mesh((2, 2), ("dp", "tp")), (sharding.Shard(0), sharding.Shard(1)))

    def read(rank: int) -> Held:
        dp, tp = divmod(rank, 2)
        local = full[3 * dp : 3 * dp + 3, 3 * tp : 3 * tp + 3].clone()
        return read_state({"module.w": local}, layouts={"w": placed("model.w", full.shape, way, rank)})

    found = [read(rank) for rank in range(4)]
    assert np.array_equal(assemble(found)["model.w"], full.numpy())
    assert list(found[0].locals) == ["w"]
    with pytest.raises(ConfigError, match="names tensors that are not there: v"):
        read_state({"w": full}, layouts={"v": placed("v", (2, 2), way, 0)})


def test_a_declared_layout_takes_a_fused_tensor_apart() -> None:
    q, k, v = values(8, 3), -values(4, 3), values(4, 3) + 100

    def read(rank: int) -> Held:
        tp = TpRank(rank, 2)
        local = torch.cat([q[4 * rank : 4 * rank + 4], k[2 * rank : 2 * rank + 2], v[2 * rank : 2 * rank + 2]])
        rows = joined(heads("q", 4, 2, tp), kv_heads("k", 2, 2, tp), kv_heads("v", 2, 2, tp))
        return read_state({"qkv": local}, layouts={"qkv": block(("q", "k", "v"), (rows, 3))})

    whole = assemble([read(0), read(1)])
    assert all(np.array_equal(whole[name], full.numpy()) for name, full in (("q", q), ("k", k), ("v", v)))


def test_sharded_tensors_of_a_state_dict_are_read_by_their_metadata() -> None:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    full = values(5, 4)

    def read(rank: int) -> Held:
        rows = full[3 * rank : 3 * rank + 3].clone()
        local = [LocalShard.from_tensor_and_offsets(rows, [3 * rank, 0], rank)]
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # torch would have DTensors
            metadata = ShardedTensorMetadata(
                [ShardMetadata([0, 0], [3, 4], "rank:0/cpu"), ShardMetadata([3, 0], [2, 4], "rank:1/cpu")],
                full.size(),
                TensorProperties(dtype=torch.float32),
            )
            sharded = ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata)
        return read_state({"w": sharded})

    assert np.array_equal(assemble(on_ranks(2, read))["w"], full.numpy())


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = torch.nn.Embedding(5, 3)
        self.up = torch.nn.Linear(3, 7)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", values(2))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_is_read_from_its_flat_shards_and_gathers_nothing(use_orig_params: bool) -> None:
    """The wrapper itself wants a GPU; what it keeps and cuts, its flat parameter, does not."""
    from torch.distributed.fsdp._flat_param import FlatParamHandle, HandleShardingStrategy

    def read(rank: int) -> Held:
        module, outer = Tied(), torch.nn.Module()
        handle = FlatParamHandle(
            list(module.parameters()), module, torch.device("cpu"), HandleShardingStrategy.FULL_SHARD,
            False, None, None, False, dist.group.WORLD, use_orig_params,
        )  # fmt: skip
        handle.shard()
        module.register_parameter("_flat_param", None if use_orig_params else handle.flat_param)
        if use_orig_params:
            handle._use_sharded_views()
        outer._fsdp_wrapped_module, outer._handle = module, handle
        return read_state(torch.nn.ModuleDict({"module": outer}))

    found = on_ranks(4, read)
    whole = assemble(found)
    assert sorted(whole) == ["counts", "embed.weight", "up.bias", "up.weight"]
    assert all(
        np.array_equal(whole[name], tensor.detach().numpy())
        for name, tensor in Tied().state_dict().items()
        if name in whole
    )
    ties = {spec.name: spec.alias_of for held in found for spec in held.holding.tensors if spec.alias_of}
    assert ties == {"head.weight": "embed.weight"}
    assert not any(held.left_out for held in found)
