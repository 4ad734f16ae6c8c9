"""Sharded PyTorch trainers (real gloo processes, real optimizer steps) to plain, TP2 and TP3 receivers.

The reference is `DTensor.full_tensor` of the trainer's own ranks, cut by plain indexing. wsync itself runs no
collective.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from _members import Child, Job, Member

from wsync.arrangements import TpRank, even, heads, joined, kv_heads, padded, vocab_padded
from wsync.holding import Holding, HoldingBuilder
from wsync.layouts import block

HIDDEN, INNER, VOCAB, HEADS, HEAD_DIM = 12, 18, 10, 6, 2
CUTS = ["fsdp2", "fsdp4", "tp2", "fsdp2xtp2"]
NUM_RANKS = {"fsdp2": 2, "fsdp4": 4, "tp2": 2, "fsdp2xtp2": 4}


# --- the trainer's ranks
def make_model() -> Any:
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
            self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
            self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
            self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
            self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
            self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
            self.norm = nn.LayerNorm(HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            x = x + self.o_proj(torch.tanh(self.q_proj(x)) * self.k_proj(x) + self.v_proj(x))
            return x + self.down_proj(torch.tanh(self.gate_proj(self.norm(x))) * self.up_proj(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, HIDDEN)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(x)

    torch.manual_seed(3)
    return Model()


def open_rank(child: Child, cut: str, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from wsync import ShardPublisher
    from wsync.integrations.sharded import read_state

    num_ranks = NUM_RANKS[cut]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    model = make_model()
    shape, names = {
        "fsdp2": ((2,), ("dp",)),
        "fsdp4": ((4,), ("dp",)),
        "tp2": ((2,), ("tp",)),
        "fsdp2xtp2": ((2, 2), ("dp", "tp")),
    }[cut]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        if "tp" in names:
            column = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
            row = dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())
            parallelize_module(layer, mesh["tp"], {**column, **row})
        if "dp" in names:
            fully_shard(layer, mesh=mesh["dp"])
    if "dp" in names:
        fully_shard(model, mesh=mesh["dp"])
    child.model, child.optimizer = model, torch.optim.SGD(model.parameters(), 0.1)  # type: ignore[attr-defined]
    held = read_state(model)
    child.publisher = ShardPublisher(
        "policy", held.holding, held.locals, rank=rank, num_ranks=num_ranks, config=child.config
    )


def step_and_publish(child: Child, step: int) -> tuple[int, dict[str, Any]]:
    """One optimizer step; the version, and every tensor whole as torch gathers it."""
    import torch
    from torch.distributed.tensor import DTensor

    model, optimizer = child.model, child.optimizer  # type: ignore[attr-defined]
    with torch.no_grad():
        for tensor, saved in getattr(child, "saved", []):
            tensor.copy_(saved)
    model(torch.arange(VOCAB).reshape(2, -1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    publication = child.publisher.publish(step)
    child.publications[publication.version] = publication
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().numpy().copy()
        for name, value in model.state_dict().items()
    }
    with torch.no_grad():
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        child.saved = [(tensor, tensor.clone()) for tensor in local]  # type: ignore[attr-defined]
        for tensor in local:  # the snapshot must not change any more
            tensor.fill_(99.0)
    return publication.version, whole


# --- the workers
def add_plain(built: HoldingBuilder) -> None:
    for name, value in make_model().state_dict().items():
        block((name,), tuple(value.shape)).add(built, name, "float32")


def add_engine(built: HoldingBuilder, tp: TpRank) -> None:
    """Fused and cut as serving engines do."""
    rows = padded("vocab", VOCAB, vocab_padded(VOCAB, 4 * tp.size), tp)
    for name in ("embed.weight", "lm_head.weight"):
        block((name,), (rows, HIDDEN)).add(built, name, "float32")
    for layer in range(2):
        prefix = f"layers.{layer}."
        qkv = joined(
            heads("q", HEADS, HEAD_DIM, tp), kv_heads("k", HEADS, HEAD_DIM, tp), kv_heads("v", HEADS, HEAD_DIM, tp)
        )
        for kind, dims in (("weight", (qkv, HIDDEN)), ("bias", (qkv,))):
            block([f"{prefix}{p}_proj.{kind}" for p in "qkv"], dims).add(built, f"{prefix}qkv.{kind}", "float32")
        gate_up = joined(even("gate", INNER, tp), even("up", INNER, tp))
        names = [f"{prefix}{p}_proj.weight" for p in ("gate", "up")]
        block(names, (gate_up, HIDDEN)).add(built, f"{prefix}gate_up.weight", "float32")
        for name, size in (("o_proj", HIDDEN), ("down_proj", INNER)):
            turned = block((f"{prefix}{name}.weight",), (HIDDEN, even(name, size, tp))).transposed((1, 0))
            turned.add(built, f"{prefix}{name}.weight", "float32")
        block((f"{prefix}norm.weight",), (HIDDEN,)).add(built, f"{prefix}norm.weight", "float32")


def worker_holding(rank: int, size: int) -> Holding:
    """Size 0: whole tensors, as in a plain module."""
    built = HoldingBuilder()
    if size:
        add_engine(built, TpRank(rank, size))
    else:
        add_plain(built)
    return built.build()


def open_worker(child: Child, rank: int, size: int) -> None:
    import torch

    from wsync import ShardReplica

    holding = worker_holding(rank, size)
    child.tensors = {spec.name: torch.full(spec.shape, 7.0) for spec in holding.locals}
    child.replica = ShardReplica("policy", holding, child.tensors, config=child.config)


def expected(whole: dict[str, Any], rank: int, size: int) -> dict[str, str]:
    """What a worker's locals must be, by plain indexing."""
    found: dict[str, Any] = {}
    if not size:
        found = dict(whole)
    else:
        share = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
        inner = slice(rank * INNER // size, (rank + 1) * INNER // size)
        num_rows = -(-VOCAB // (4 * size)) * 4
        for name in ("embed.weight", "lm_head.weight"):
            rows = whole[name][rank * num_rows : (rank + 1) * num_rows]
            found[name] = np.concatenate([rows, np.full((num_rows - len(rows), HIDDEN), 7.0, np.float32)])
        for layer in range(2):
            prefix = f"layers.{layer}."
            for kind in ("weight", "bias"):
                found[f"{prefix}qkv.{kind}"] = np.concatenate([whole[f"{prefix}{p}_proj.{kind}"][share] for p in "qkv"])
            found[f"{prefix}gate_up.weight"] = np.concatenate(
                [whole[f"{prefix}{p}_proj.weight"][inner] for p in ("gate", "up")]
            )
            found[f"{prefix}o_proj.weight"] = whole[f"{prefix}o_proj.weight"][:, share].T
            found[f"{prefix}down_proj.weight"] = whole[f"{prefix}down_proj.weight"][:, inner].T
            found[f"{prefix}norm.weight"] = whole[f"{prefix}norm.weight"]
    return {name: hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest() for name, value in found.items()}


def all_ranks(ranks: list[Member], name: str, *args: Any) -> list[Any]:
    """A call that the ranks make at the same time, as their own collectives need."""
    for rank, member in enumerate(ranks):
        member.begin("run", *(globals()[name], *(arg(rank) if callable(arg) else arg for arg in args)))
    return [member.end() for member in ranks]


@pytest.mark.parametrize("cut", CUTS)
def test_three_versions_equal_full_tensor(job: Job, cut: str) -> None:
    ranks = [job.member(has_torch=True) for _ in range(NUM_RANKS[cut])]
    all_ranks(ranks, "open_rank", cut, lambda rank: rank, str(job.folder / "store"))
    kinds = [(0, 0), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)]
    workers = [job.member("B" if size == 2 else "A", has_torch=True) for _, size in kinds]
    for member, (rank, size) in zip(workers, kinds, strict=True):
        member.run(open_worker, rank, size)
    for step in (1, 2, 3):
        told = all_ranks(ranks, "step_and_publish", step)
        assert {version for version, _ in told} == {step}
        whole = told[0][1]
        for _, other in told[1:]:
            assert all(np.array_equal(whole[name], other[name]) for name in whole)
        for member, (rank, size) in zip(workers, kinds, strict=True):
            old = member.digest()
            assert member.wait_version(step) == step
            assert member.digest() == expected(whole, rank, size), (rank, size)
            assert not set(member.digest().items()) & set(old.items())
        ranks[0].wait_committed(step, 20.0)
