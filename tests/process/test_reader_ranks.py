"""Real ranks (gloo) read their own shards after an optimizer step; from these alone every tensor is put together.

Run as a script, this file is one rank. Ranks read strictly one after another: a rank begins when the one before has
written down what it has, so that a collective in between would wait for ever. The reference is `full_tensor()`, made by
the ranks themselves afterwards.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from wsync.holding import Holding

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
WAIT_S = 90.0
WORLDS = {2: ("fsdp", "tp"), 4: ("fsdp", "fsdp_tp", "hsdp")}
"""Number of ranks -> the ways in which they cut a model, one after another."""

Arrays = dict[str, np.ndarray[Any, Any]]


# --- one rank


def main(rank: int, size: int, folder: Path, ways: list[str]) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=WAIT_S)
    dist.init_process_group("gloo", f"file://{folder}/store", limit, world_size=size, rank=rank)
    for way in ways:
        (folder / way).mkdir(exist_ok=True)
        model, step = build(way, size)
        before = {name: whole(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        step()
        read_in_turn(model, rank, folder / way)
        after = {name: whole(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        if rank == 0:
            write_arrays(folder / way / "before", before)
            write_arrays(folder / way / "after", after)
    (folder / f"{rank}.done").touch()
    wait_for([folder / f"{other}.done" for other in range(size)])
    os._exit(0)  # gloo's threads sometimes end an interpreter that shuts down with "terminate called"


def build(way: str, size: int) -> Any:
    """The model cut as `way` says, and a function that takes an optimizer step."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Model(torch.nn.Module):
        """Dims that the ranks do not divide; a tie; a matrix of fewer rows than there are ranks."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(10, 12)
            self.norm = torch.nn.LayerNorm(12)
            self.up = torch.nn.Linear(12, 18)
            self.down = torch.nn.Linear(18, 12, bias=False)
            self.gate = torch.nn.Linear(12, 3)
            self.head = torch.nn.Linear(12, 10, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, tokens: Any) -> Any:
            self.seen += 1
            x = self.embed(tokens)
            x = x + self.down(torch.relu(self.up(self.norm(x))))
            return self.head(x).logsumexp(-1).mean() + self.gate(x).square().mean()

    torch.manual_seed(11)
    model = Model()
    if way == "zero3":
        return build_zero3(model)
    if "tp" in way:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        meshes = [mesh["dp"]] if "fsdp" in way else []
    elif way == "hsdp":
        meshes = [init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))]
    else:
        meshes = [init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))]
    for mesh in meshes:
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

    def step() -> None:
        model(torch.arange(8).remainder(10)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def build_zero3(model: Any) -> Any:
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step() -> None:
        engine.backward(engine(torch.arange(8).remainder(10)))
        engine.step()

    return engine.module, step


def read_in_turn(model: Any, rank: int, folder: Path) -> None:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from wsync.integrations.sharded import read_state

    class NoCollectives(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace in {"c10d", "_c10d_functional"}:
                raise AssertionError(f"{func} was called")
            return func(*args, **(kwargs or {}))

    wait_for([folder / f"{rank - 1}.holding"] if rank else [])
    with NoCollectives():
        held = read_state(model)
        with contextlib.suppress(AssertionError):
            torch.distributed.all_reduce(torch.ones(1))
            raise SystemExit("this test would not notice a collective")
    write_arrays(folder / f"{rank}.locals", {name: local.numpy() for name, local in held.locals.items()})
    path = folder / f"{rank}.holding"
    path.with_suffix(".part").write_bytes(msgspec.msgpack.encode(held.holding))
    path.with_suffix(".placements").write_text(repr(getattr(model.up.weight, "placements", "")))
    path.with_suffix(".part").rename(path)


def wait_for(files: Sequence[Path]) -> None:
    deadline = time.monotonic() + WAIT_S
    for file in files:
        while not file.exists():
            assert time.monotonic() < deadline, f"waited for {file.name}"
            time.sleep(0.01)


def whole(tensor: Any) -> np.ndarray[Any, Any]:
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return np.array(tensor.detach().numpy())
    return np.array((tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().numpy())


def write_arrays(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:
        np.savez(file, **arrays)


# --- the parent


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of ranks, the folder in which these have written what they have."""
    folders = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in WORLDS}
    for size, ways in WORLDS.items():
        run_ranks(size, folders[size], ways)
    return folders


def run_ranks(size: int, folder: Path, ways: Sequence[str]) -> None:
    """After this all ranks have ended, without an error."""
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(size):
            command = [sys.executable, __file__, str(rank), str(size), str(folder), *ways]
            environment = os.environ | quiet | {"LOCAL_RANK": str(rank)}
            log = stack.enter_context((folder / f"{rank}.log").open("w"))
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        deadline = time.monotonic() + 2 * WAIT_S
        for rank, process in enumerate(ranks):
            code = process.wait(max(deadline - time.monotonic(), 1.0))
            assert code == 0, (folder / f"{rank}.log").read_text()


def read_arrays(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return dict(arrays)


def assemble(folder: Path, size: int) -> tuple[Arrays, dict[str, str]]:
    """Every tensor from the pieces of all ranks, and the ties; each element is there, the same wherever it is."""
    tensors: Arrays = {}
    there: Arrays = {}
    ties: dict[str, str] = {}
    for rank in range(size):
        holding = msgspec.msgpack.decode((folder / f"{rank}.holding").read_bytes(), type=Holding)
        locals_ = read_arrays(folder / f"{rank}.locals")
        ties.update({spec.name: spec.alias_of for spec in holding.tensors if spec.alias_of})
        for piece in holding.pieces:
            spec, local = holding.tensors[piece.tensor], locals_[holding.locals[piece.place.local].name]
            offset, strides = piece.place.strided([stride // local.itemsize for stride in local.strides])
            view = np.lib.stride_tricks.as_strided(
                local.reshape(-1)[offset:], piece.region.extent, [stride * local.itemsize for stride in strides]
            )
            box = tuple(slice(o, o + e) for o, e in zip(piece.region.offset, piece.region.extent, strict=True))
            tensor = tensors.setdefault(spec.name, np.zeros(spec.shape, local.dtype))
            known = there.setdefault(spec.name, np.zeros(spec.shape, bool))
            assert (tensor[box] == view)[known[box]].all(), f"ranks differ in {spec.name}{piece.region}"
            tensor[box] = view
            known[box] = True
    assert all(known.all() for known in there.values())
    return tensors, ties


@pytest.mark.parametrize(("size", "way"), [(size, way) for size, ways in WORLDS.items() for way in ways])
def test_shards_read_rank_by_rank_make_the_tensors_after_a_step(worlds: dict[int, Path], size: int, way: str) -> None:
    folder = worlds[size] / way
    check_shards(folder, size)
    placements = (folder / "0.placements").read_text()
    assert ("_StridedShard" in placements) == (way == "fsdp_tp"), placements


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_zero3_partitions_read_rank_by_rank_make_the_tensors_after_a_step(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, ["zero3"])
    check_shards(tmp_path / "zero3", 2)


def check_shards(folder: Path, size: int) -> None:
    before, after = read_arrays(folder / "before"), read_arrays(folder / "after")
    tensors, ties = assemble(folder, size)
    assert ties == {"head.weight": "embed.weight"}
    assert sorted([*tensors, *ties]) == sorted(after)
    for name, tensor in tensors.items():
        assert tensor.tobytes() == after[name].tobytes(), name
        assert tensor.tobytes() != before[name].tobytes(), f"the step did not change {name}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
