"""DeepSpeed ZeRO-3 on two ranks, to a plain and two tensor-parallel receivers. `make test-zero3` installs deepspeed.

The reference is DeepSpeed's own gathering of each parameter.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from typing import Any

import numpy as np
import pytest
from _members import Child, Job, Member

from wsync.arrangements import TpRank, even
from wsync.holding import HoldingBuilder
from wsync.layouts import block

pytestmark = [
    pytest.mark.timeout(400),  # deepspeed compiles an extension first
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: make test-zero3"
    ),
]
SHAPES = {"0.weight": (7, 5), "0.bias": (7,), "2.weight": (6, 7), "2.bias": (6,)}
NUM_RANKS = 2


def open_rank(child: Child, rank: int, store: str) -> None:
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch import nn

    from wsync import ShardPublisher
    from wsync.integrations.sharded import read_state

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(NUM_RANKS), "DS_ACCELERATOR": "cpu"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )
    child.engine = engine  # type: ignore[attr-defined]
    held = read_state(engine.module)
    child.publisher = ShardPublisher(
        "policy", held.holding, held.locals, rank=rank, num_ranks=NUM_RANKS, config=child.config
    )


def step_and_publish(child: Child, step: int) -> tuple[int, dict[str, Any]]:
    """One optimizer step; the version, and every tensor whole as DeepSpeed gathers it."""
    import deepspeed
    import torch

    engine = child.engine  # type: ignore[attr-defined]
    loss = engine(torch.linspace(-1, 1, 10).reshape(2, 5)).square().mean()
    engine.backward(loss)
    engine.step()
    version = child.publisher.publish(step).version
    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole[name] = parameter.detach().numpy().copy()
    return version, whole


def open_worker(child: Child, rank: int, size: int) -> None:
    import torch

    from wsync import ShardReplica

    built = HoldingBuilder()
    for name, (rows, *rest) in SHAPES.items():
        cut = even(name, rows, TpRank(rank, size)) if name.startswith("2") else rows
        block((name,), (cut, *rest)).add(built, name, "float32")
    holding = built.build()
    child.tensors = {spec.name: torch.full(spec.shape, 7.0) for spec in holding.locals}
    child.replica = ShardReplica("policy", holding, child.tensors, config=child.config)


def expected(whole: dict[str, Any], rank: int, size: int) -> dict[str, str]:
    found = {
        name: value[rank * 6 // size : (rank + 1) * 6 // size] if name.startswith("2") else value
        for name, value in whole.items()
    }
    return {name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for name, value in found.items()}


def all_ranks(ranks: list[Member], function: Any, *args: Any) -> list[Any]:
    """A call that the ranks make at the same time, as DeepSpeed's collectives need."""
    for rank, member in enumerate(ranks):
        member.begin("run", function, *([rank] if function is open_rank else []), *args)
    return [member.end(350.0) for member in ranks]


def test_three_versions_equal_what_deepspeed_gathers(job: Job) -> None:
    ranks = [job.member(has_torch=True) for _ in range(NUM_RANKS)]
    all_ranks(ranks, open_rank, str(job.folder / "store"))
    kinds = [(0, 1), (0, 2), (1, 2)]
    workers = [job.member("B" if size == 2 else "A", has_torch=True) for _, size in kinds]
    for member, (rank, size) in zip(workers, kinds, strict=True):
        member.run(open_worker, rank, size)
    for step in (1, 2, 3):
        told = all_ranks(ranks, step_and_publish, step)
        assert {version for version, _ in told} == {step}
        whole = told[0][1]
        assert {name: value.shape for name, value in whole.items()} == SHAPES
        for member, (rank, size) in zip(workers, kinds, strict=True):
            old = member.digest()
            assert member.wait_version(step) == step
            assert member.digest() == expected(whole, rank, size)
            assert not set(member.digest().items()) & set(old.items())
