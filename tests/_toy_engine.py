"""A small engine whose parameters are laid out as inference engines do it: fused, stacked, padded, cut by rank.

Every parameter has a `weight_loader`, and `load_weights` finds it by the checkpoint's names. Attention is cut by rank
with whole heads (KV heads are copied when there are more ranks than heads), experts go to ranks whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from wsync.manifest import TensorSpec

STACKED = (
    ("qkv_proj", "q_proj", "q"),
    ("qkv_proj", "k_proj", "k"),
    ("qkv_proj", "v_proj", "v"),
    ("gate_up_proj", "gate_proj", 0),
    ("gate_up_proj", "up_proj", 1),
)


@dataclass(frozen=True)
class Sizes:
    hidden: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    intermediate: int = 12
    experts: int = 4
    vocab: int = 150
    layers: int = 2


SIZES = Sizes()


@dataclass(frozen=True)
class Variant:
    """`tied`: the head is the embedding itself; "copy": a copy of it; "separate": a tensor of its own.

    `norm`: "plain", or "plus_one" (stored with one added). `experts`: "plain" or "transposed" (stored [E, H, 2I]).
    """

    head: str = "tied"
    norm: str = "plain"
    experts: str = "plain"


def specs(variant: Variant = Variant(), sizes: Sizes = SIZES) -> tuple[TensorSpec, ...]:
    """The checkpoint's tensors."""
    s, found = sizes, [("embed_tokens.weight", (sizes.vocab, sizes.hidden))]
    for layer in range(s.layers):
        at = f"layers.{layer}"
        found += [(f"{at}.input_norm.weight", (s.hidden,))]
        found += [(f"{at}.attn.q_proj.weight", (s.heads * s.head_dim, s.hidden))]
        found += [(f"{at}.attn.{n}_proj.weight", (s.kv_heads * s.head_dim, s.hidden)) for n in "kv"]
        found += [(f"{at}.attn.{n}_proj.bias", (s.kv_heads * s.head_dim,)) for n in "kv"]
        found += [(f"{at}.attn.q_proj.bias", (s.heads * s.head_dim,))]
        found += [(f"{at}.attn.o_proj.weight", (s.hidden, s.heads * s.head_dim))]
        found += [(f"{at}.mlp.{n}_proj.weight", (s.intermediate, s.hidden)) for n in ("gate", "up")]
        found += [(f"{at}.mlp.down_proj.weight", (s.hidden, s.intermediate))]
        found += [(f"{at}.moe.router.weight", (s.experts, s.hidden))]
        for e in range(s.experts):
            found += [(f"{at}.moe.experts.{e}.{n}_proj.weight", (s.intermediate, s.hidden)) for n in ("gate", "up")]
            found += [(f"{at}.moe.experts.{e}.down_proj.weight", (s.hidden, s.intermediate))]
    found += [("norm.weight", (s.hidden,))]
    made = [TensorSpec(n, "float32" if "router" in n else "bfloat16", shape) for n, shape in found]
    alias = "" if variant.head == "separate" else "embed_tokens.weight"
    return (*made, TensorSpec("lm_head.weight", "bfloat16", (s.vocab, s.hidden), alias))


def checkpoint(seed: int, specs: Iterable[TensorSpec]) -> dict[str, torch.Tensor]:
    generator, made = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for spec in specs:
        random = torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        made[spec.name] = made[spec.alias_of] if spec.alias_of else random
    return made


def parameter(shape: tuple[int, ...], loader: Callable[..., None], dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    made = nn.Parameter(torch.full(shape, -1.0, dtype=dtype), requires_grad=False)
    made.weight_loader = loader
    return made


class Plain(nn.Module):
    """One parameter, taken as it is or cut by rank along a dim."""

    def __init__(
        self, shape: tuple[int, ...], tp: tuple[int, int], dim: int | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.tp, self.dim = tp, dim
        local = tuple(n // tp[1] if d == dim else n for d, n in enumerate(shape))
        self.weight = parameter(local, self.load, dtype)

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        if self.dim is not None:
            size = param.shape[self.dim]
            loaded = loaded.narrow(self.dim, self.tp[0] * size, size)
        assert param.shape == loaded.shape
        param.data.copy_(loaded)


class NormPlusOne(Plain):
    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        param.data.copy_(1 + loaded)


class Qkv(nn.Module):
    def __init__(self, sizes: Sizes, tp: tuple[int, int]) -> None:
        super().__init__()
        self.rank, self.head_dim = tp[0], sizes.head_dim
        self.num_heads = sizes.heads // tp[1]
        self.num_kv_heads = max(1, sizes.kv_heads // tp[1])
        self.copies = max(1, tp[1] // sizes.kv_heads)
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.weight = parameter((rows, sizes.hidden), self.load)
        self.bias = parameter((rows,), self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, part: str) -> None:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[part]
        shard = self.rank if part == "q" else self.rank // self.copies
        param.data.narrow(0, start, size).copy_(loaded.narrow(0, shard * size, size))


class GateUp(nn.Module):
    def __init__(self, sizes: Sizes, tp: tuple[int, int]) -> None:
        super().__init__()
        self.tp = tp
        self.weight = parameter((2 * sizes.intermediate // tp[1], sizes.hidden), self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, part: int) -> None:
        param.data.chunk(2)[part].copy_(loaded.chunk(self.tp[1])[self.tp[0]])


class Experts(nn.Module):
    def __init__(self, sizes: Sizes, tp: tuple[int, int], *, is_transposed: bool) -> None:
        super().__init__()
        self.num_local, self.rank, self.is_transposed = sizes.experts // tp[1], tp[0], is_transposed
        w13, w2 = (2 * sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
        self.w13_weight = parameter((self.num_local, *(w13[::-1] if is_transposed else w13)), self.load)
        self.w2_weight = parameter((self.num_local, *(w2[::-1] if is_transposed else w2)), self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor, expert: int, part: str) -> None:
        local = expert - self.rank * self.num_local
        if not 0 <= local < self.num_local:
            return
        target = param.data[local]
        if self.is_transposed:
            loaded = loaded.t().contiguous()
        dim = 1 if self.is_transposed else 0
        if part != "down":
            target = target.chunk(2, dim)[part == "up"]
        target.copy_(loaded)


class Vocab(nn.Module):
    def __init__(self, sizes: Sizes, tp: tuple[int, int]) -> None:
        super().__init__()
        self.rank, self.vocab = tp[0], sizes.vocab
        self.size = -(-sizes.vocab // (64 * tp[1])) * 64
        self.weight = parameter((self.size, sizes.hidden), self.load)

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        start = min(self.rank * self.size, self.vocab)
        rows = min(self.size, self.vocab - start)
        param.data[:rows].copy_(loaded[start : start + rows])
        param.data[rows:].fill_(0)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, tp: tuple[int, int], variant: Variant) -> None:
        super().__init__()
        h, i = sizes.hidden, sizes.intermediate
        self.input_norm = (NormPlusOne if variant.norm == "plus_one" else Plain)((h,), tp)
        self.attn = nn.Module()
        self.attn.qkv_proj = Qkv(sizes, tp)
        self.attn.o_proj = Plain((h, sizes.heads * sizes.head_dim), tp, dim=1)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = GateUp(sizes, tp)
        self.mlp.down_proj = Plain((h, i), tp, dim=1)
        self.moe = nn.Module()
        self.moe.router = Plain((sizes.experts, h), tp, dtype=torch.float32)
        self.moe.experts = Experts(sizes, tp, is_transposed=variant.experts == "transposed")


class ToyEngine(nn.Module):
    def __init__(self, tp_rank: int, tp_size: int, variant: Variant = Variant(), sizes: Sizes = SIZES) -> None:
        super().__init__()
        tp = (tp_rank, tp_size)
        self.variant = variant
        self.embed_tokens = Vocab(sizes, tp)
        self.layers = nn.ModuleList(Layer(sizes, tp, variant) for _ in range(sizes.layers))
        self.norm = Plain((sizes.hidden,), tp)
        self.lm_head = Vocab(sizes, tp)
        if variant.head == "tied":
            self.lm_head.weight = self.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        params, loaded = dict(self.named_parameters(remove_duplicate=False)), set[str]()
        for name, tensor in weights:
            if self.variant.head == "tied" and name == "lm_head.weight":
                continue
            if ".experts." in name:
                at, _, rest = name.partition(".experts.")
                expert, part, _ = rest.split(".")
                param_name = f"{at}.experts.{'w2' if part == 'down_proj' else 'w13'}_weight"
                params[param_name].weight_loader(params[param_name], tensor, int(expert), part.removesuffix("_proj"))
                loaded.add(param_name)
                continue
            for fused, part, shard in STACKED:
                if f".{part}." in name:
                    param_name = name.replace(part, fused)
                    params[param_name].weight_loader(params[param_name], tensor, shard)
                    break
            else:
                param_name = name
                params[name].weight_loader(params[name], tensor)
            loaded.add(param_name)
        return loaded
