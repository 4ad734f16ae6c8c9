"""The layouts of a mixture-of-experts model of 1T parameters on both sides, as holdings. No tensors, no files.

The public numbers of Kimi-K2: 61 layers, the first one dense, 384 experts and a shared one, hidden size 7168, experts
of 2048, latent attention with 64 heads. Names are those of a checkpoint with one tensor per expert and projection:
69,975 of them. (The implementation in transformers stacks the experts, which makes 975 of the same, and has two
buffers besides that no checkpoint has.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from wsync.holding import Holding, HoldingBuilder, Region

VOCABULARY, HIDDEN, DENSE, EXPERT = 163840, 7168, 18432, 2048
HEADS, NOPE, ROPE, VALUE, Q_RANK, KV_RANK = 64, 128, 64, 128, 1536, 512
Cut = Literal["rows", "columns", "whole", "expert"]
"""How tensor-parallel workers cut it; experts are dealt whole."""


class Size(msgspec.Struct, frozen=True):
    """How much of the model, and on how many members."""

    num_layers: int = 61
    num_experts: int = 384
    num_trainers: int = 256
    num_expert_groups: int = 64
    """Trainer ranks are (expert group, shard): a group's experts are cut over its ranks, all else over all ranks."""
    num_workers: int = 8


class Tensor(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    cut: Cut
    expert: int = -1


def tensors_of(size: Size, experts: range | None = None) -> Iterator[Tensor]:
    """The checkpoint, in its order; of the experts only these, or all."""
    experts = range(size.num_experts) if experts is None else experts
    yield Tensor("model.embed_tokens.weight", "bfloat16", (VOCABULARY, HIDDEN), "rows")
    for index in range(size.num_layers):
        yield from _layer(f"model.layers.{index}", size, experts, is_dense=index == 0)
    yield Tensor("model.norm.weight", "bfloat16", (HIDDEN,), "whole")
    yield Tensor("lm_head.weight", "bfloat16", (VOCABULARY, HIDDEN), "rows")


def _layer(prefix: str, size: Size, experts: range, *, is_dense: bool) -> Iterator[Tensor]:
    def tensor(name: str, *shape: int, cut: Cut = "whole", dtype: str = "bfloat16", expert: int = -1) -> Tensor:
        return Tensor(f"{prefix}.{name}", dtype, shape, cut, expert)

    yield tensor("self_attn.q_a_proj.weight", Q_RANK, HIDDEN)
    yield tensor("self_attn.q_a_layernorm.weight", Q_RANK)
    yield tensor("self_attn.q_b_proj.weight", HEADS * (NOPE + ROPE), Q_RANK, cut="rows")
    yield tensor("self_attn.kv_a_proj_with_mqa.weight", KV_RANK + ROPE, HIDDEN)
    yield tensor("self_attn.kv_a_layernorm.weight", KV_RANK)
    yield tensor("self_attn.kv_b_proj.weight", HEADS * (NOPE + VALUE), KV_RANK, cut="rows")
    yield tensor("self_attn.o_proj.weight", HIDDEN, HEADS * VALUE, cut="columns")
    yield tensor("input_layernorm.weight", HIDDEN)
    yield tensor("post_attention_layernorm.weight", HIDDEN)
    if not is_dense:
        yield tensor("mlp.gate.weight", size.num_experts, HIDDEN, dtype="float32")
        yield tensor("mlp.gate.e_score_correction_bias", size.num_experts, dtype="float32")
    wide = DENSE if is_dense else EXPERT
    mlp = "mlp" if is_dense else "mlp.shared_experts"
    yield tensor(f"{mlp}.gate_proj.weight", wide, HIDDEN, cut="rows")
    yield tensor(f"{mlp}.up_proj.weight", wide, HIDDEN, cut="rows")
    yield tensor(f"{mlp}.down_proj.weight", HIDDEN, wide, cut="columns")
    for expert in range(0) if is_dense else experts:
        for name, shape in (("gate", (EXPERT, HIDDEN)), ("up", (EXPERT, HIDDEN)), ("down", (HIDDEN, EXPERT))):
            yield tensor(f"mlp.experts.{expert}.{name}_proj.weight", *shape, cut="expert", expert=expert)


def trainer(size: Size, rank: int) -> Holding:
    """Experts by group and then cut by rows over the group's ranks; everything else cut by rows over all ranks."""
    per_group = size.num_trainers // size.num_expert_groups
    group, shard = divmod(rank, per_group)
    experts = _part(size.num_experts, size.num_expert_groups, group)
    builder = HoldingBuilder()
    for tensor in tensors_of(size, experts):
        parts, part = (per_group, shard) if tensor.expert >= 0 else (size.num_trainers, rank)
        _whole_piece(builder, tensor, _cut(tensor.shape, 0, parts, part), "float32")
    return builder.build()


def worker(size: Size, rank: int) -> Holding:
    """Experts stacked with gate over up, as engines keep them; attention and shared experts cut by heads and width."""
    experts = _part(size.num_experts, size.num_workers, rank)
    builder = HoldingBuilder()
    for tensor in tensors_of(size, experts):
        if tensor.expert >= 0:
            _stacked(builder, tensor, experts)
        else:
            dim = {"rows": 0, "columns": 1}.get(tensor.cut)
            region = Region.whole(tensor.shape) if dim is None else _cut(tensor.shape, dim, size.num_workers, rank)
            _whole_piece(builder, tensor, region, tensor.dtype)
    return builder.build()


def _stacked(builder: HoldingBuilder, tensor: Tensor, experts: range) -> None:
    stack, _, projection = tensor.name.removesuffix("_proj.weight").rpartition(f".{tensor.expert}.")
    is_up, is_down = projection == "up", projection == "down"
    local = stack + (".w2" if is_down else ".w13")
    shape = (HIDDEN, EXPERT) if is_down else (2 * EXPERT, HIDDEN)
    if tensor.expert == experts.start and not is_up:
        builder.local(local, tensor.dtype, (len(experts), *shape))
    builder.tensor(tensor.name, tensor.dtype, tensor.shape)
    start = (tensor.expert - experts.start, EXPERT if is_up else 0, 0)
    builder.piece(tensor.name, Region.whole(tensor.shape), local, start, dims=(1, 2))


def _whole_piece(builder: HoldingBuilder, tensor: Tensor, region: Region, dtype: str) -> None:
    builder.tensor(tensor.name, tensor.dtype, tensor.shape)
    builder.local(tensor.name, dtype, region.extent)
    if region.numel:
        builder.piece(tensor.name, region, tensor.name, (0,) * len(tensor.shape))


def _part(size: int, num_parts: int, part: int) -> range:
    """Ceiling division, as FSDP and expert parallelism do it: the last parts may be short or empty."""
    step = -(-size // num_parts)
    return range(min(part * step, size), min((part + 1) * step, size))


def _cut(shape: tuple[int, ...], dim: int, num_parts: int, part: int) -> Region:
    rows = _part(shape[dim], num_parts, part)
    offset = tuple(rows.start if d == dim else 0 for d in range(len(shape)))
    return Region(offset, tuple(len(rows) if d == dim else extent for d, extent in enumerate(shape)))
