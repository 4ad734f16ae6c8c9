"""The layout algebra against torch itself: the local tensors that DTensor and fully_shard really make.

torch's fake process group lets one process be any rank; with `src_data_rank=None` nothing is communicated, each rank
cuts the same whole tensor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from _reading import Array
from test_sharding import assembled

from wsync.sharding import Mesh, Placement, Replicate, Shard, Sharding, StridedShard, is_same_everywhere

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import tensor as dt  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import placement_types  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

SIZE = 12


@contextmanager
def being(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=SIZE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def torch_placement(placement: Placement) -> dt.Placement:
    if isinstance(placement, Shard):
        return dt.Shard(placement.dim)
    if isinstance(placement, StridedShard):
        return placement_types._StridedShard(placement.dim, split_factor=placement.split_factor)
    return dt.Replicate()


def read_placement(placement: dt.Placement) -> Placement:
    if isinstance(placement, placement_types._StridedShard):
        return StridedShard(placement.dim, placement.split_factor)
    return Shard(placement.dim) if isinstance(placement, dt.Shard) else Replicate()


def random_cases(num: int) -> list[tuple[tuple[int, ...], Sharding]]:
    choose = random.Random(0)
    cases = []
    for _ in range(num):
        grid = choose.choice([(12,), (2, 6), (6, 2), (3, 4), (4, 3), (2, 2, 3), (3, 2, 2), (1, 4, 3)])
        ranks = list(range(SIZE))
        if choose.random() < 0.5:
            choose.shuffle(ranks)
        shape = tuple(choose.choice([0, 1, 2, 3, 5, 8, 9, 12, 17, 24, 25]) for _ in range(choose.randint(1, 3)))
        kinds: list[Placement] = [Replicate()]
        for dim in range(len(shape)):
            kinds += [Shard(dim), Shard(dim), StridedShard(dim, choose.randint(1, 5))]
        placements = tuple(choose.choice(kinds) for _ in grid)
        cases.append((shape, Sharding(Mesh(grid, tuple("xyz"[: len(grid)]), tuple(ranks)), placements)))
    return cases


def test_distribute_tensor_gives_each_rank_what_cuts_say() -> None:
    cases = random_cases(60)
    num_uneven = num_strided = 0
    for rank in range(SIZE):
        with being(rank):
            for shape, sharding in cases:
                mesh = sharding.mesh
                there = DeviceMesh("cpu", torch.tensor(mesh.ranks).reshape(mesh.shape), mesh_dim_names=mesh.axes)
                array = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
                placements = [torch_placement(p) for p in sharding.placements]
                local = dt.distribute_tensor(torch.from_numpy(array), there, placements, src_data_rank=None).to_local()
                ours = assembled(array, sharding, rank)
                assert local.shape == ours.shape, (shape, sharding, rank)
                np.testing.assert_array_equal(local.numpy(), ours, str((shape, sharding, rank)))
                num_uneven += local.numel() * SIZE != array.size
                num_strided += any(isinstance(p, StridedShard) for p in sharding.placements)
    assert num_uneven > 100
    assert num_strided > 100


class Net(nn.Module):
    """Numbered weights: `up` is cut by columns, `down` by rows, `norm` not at all."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, rows)
        self.down = nn.Linear(rows, 6)
        self.norm = nn.LayerNorm(rows)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.arange(p.numel()).reshape(p.shape))


def sharded_net(rows: int, grid: tuple[int, ...], axes: tuple[str, ...]) -> tuple[Net, dict[str, Array]]:
    net = Net(rows)
    whole = {name: p.detach().numpy().astype(np.int64) for name, p in net.named_parameters()}
    mesh = DeviceMesh("cpu", torch.arange(SIZE).reshape(grid), mesh_dim_names=axes)
    if "tp" in axes:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan, src_data_rank=None)
    fully_shard(net, mesh=mesh[tuple(axis for axis in axes if axis != "tp")])
    return net, whole


@pytest.mark.parametrize(
    ("grid", "axes"),
    [
        ((12,), ("dp",)),
        ((6, 2), ("dp", "tp")),
        ((3, 4), ("dp", "tp")),
        ((2, 6), ("replica", "dp")),
        ((2, 3, 2), ("replica", "dp", "tp")),
    ],
)
def test_fully_shard_holds_what_nested_cuts_say(grid: tuple[int, ...], axes: tuple[str, ...]) -> None:
    num_differ = 0
    kinds: set[type[Placement]] = set()
    mesh = Mesh(grid, axes)
    for rows in (5, 8, 12, 13, 21, 24):
        for rank in range(SIZE):
            with being(rank):
                net, whole = sharded_net(rows, grid, axes)
                for name, p in net.named_parameters():
                    placements = tuple(read_placement(q) for q in p.placements)
                    kinds |= {type(q) for q in placements}
                    # Parameters that TP leaves alone lie on the data-parallel axes only.
                    rest = (Replicate(),) * (len(grid) - len(placements))
                    sharding = Sharding(mesh, placements + rest)
                    local = p.to_local().detach().numpy().astype(np.int64)
                    ours = assembled(whole[name], sharding.nested(), rank)
                    if ours.size == 0:  # where TP leaves no columns, fully_shard says shape [0, 0] for our [n, 0]
                        local = local.reshape(ours.shape)
                    np.testing.assert_array_equal(local, ours, name)
                    placed = assembled(whole[name], sharding, rank)
                    is_placed = placed.shape == local.shape and bool((placed == local).all())
                    num_differ += not is_placed
                    assert is_placed or not is_same_everywhere(name, whole[name].shape, sharding, sharding.nested())
    assert (StridedShard in kinds) == ("tp" in axes)
    assert (Replicate in kinds) == ("replica" in axes or "tp" in axes)
    if grid == (6, 2):
        assert num_differ, "torch 2.13: uneven shards do not lie where their own placements say"


def test_case_A34_fsdp_inside_tensor_parallel() -> None:
    """dim0 = 4 on dp2 x tp2: the ranks hold rows [0], [2], [1], [3]; rank order would give [0, 2, 1, 3]."""
    mesh = Mesh((2, 2), ("dp", "tp"), (0, 1, 2, 3))
    held = []
    for rank in range(4):
        with being(rank):
            there = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
            net = nn.Linear(1, 4, bias=False)
            with torch.no_grad():
                net.weight.copy_(torch.arange(4)[:, None])
            parallelize_module(net, there["tp"], ColwiseParallel(), src_data_rank=None)
            fully_shard(net, mesh=there["dp"])
            placements = tuple(read_placement(p) for p in net.weight.placements)
            assert placements == (StridedShard(0, 2), Shard(0))
            local = net.weight.to_local().detach().flatten().tolist()
            assert assembled(np.arange(4).reshape(4, 1), Sharding(mesh, placements), rank).ravel().tolist() == local
            held.append(local)
    assert held == [[0], [2], [1], [3]]
