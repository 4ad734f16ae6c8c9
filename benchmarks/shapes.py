"""The weights that the benchmarks broadcast: real shapes, new bytes in every round, an independent reference.

Shapes are those of Qwen3-0.6B (hidden 1024, 16 query and 8 key-value heads of 128, intermediate 3072, tied
vocabulary of 151936), with as many layers as the wanted bytes allow. Bytes are a pure function of (seed, round,
tensor), so that a process that has only received them can tell whether they are right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

HIDDEN, QUERY, KEY_VALUE, INTERMEDIATE, VOCABULARY, HEAD = 1024, 2048, 1024, 3072, 151936, 128
ITEMSIZE = 2  # bfloat16

Layout = tuple[tuple[str, tuple[int, ...]], ...]

_POOL_WORDS = 1 << 22
_BLOCK_WORDS = 1 << 18


def layout_of(nbytes: int) -> Layout:
    """Names and shapes of about `nbytes` bytes. The vocabulary is halved until it takes at most a third of them."""
    vocabulary = VOCABULARY
    while vocabulary * HIDDEN * ITEMSIZE > nbytes // 3:
        vocabulary //= 2
    layer = _layer("model.layers.0")
    left = nbytes - vocabulary * HIDDEN * ITEMSIZE
    num_layers = max(1, round(left / nbytes_of(layer)))
    layers = itertools.chain.from_iterable(_layer(f"model.layers.{index}") for index in range(num_layers))
    return (("model.embed_tokens.weight", (vocabulary, HIDDEN)), *layers, ("model.norm.weight", (HIDDEN,)))


def _layer(prefix: str) -> Layout:
    return (
        (f"{prefix}.input_layernorm.weight", (HIDDEN,)),
        (f"{prefix}.self_attn.q_proj.weight", (QUERY, HIDDEN)),
        (f"{prefix}.self_attn.k_proj.weight", (KEY_VALUE, HIDDEN)),
        (f"{prefix}.self_attn.v_proj.weight", (KEY_VALUE, HIDDEN)),
        (f"{prefix}.self_attn.o_proj.weight", (HIDDEN, QUERY)),
        (f"{prefix}.self_attn.q_norm.weight", (HEAD,)),
        (f"{prefix}.self_attn.k_norm.weight", (HEAD,)),
        (f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)),
        (f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)),
        (f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)),
        (f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)),
    )


def nbytes_of(layout: Layout) -> int:
    """Bytes of all tensors of a layout."""
    return ITEMSIZE * sum(int(np.prod(shape)) for _, shape in layout)


class Weights:
    """One process's copy of the weights: `tensors` (CPU, bfloat16) that are never reallocated.

    A trainer calls `fill(n)`. A receiver calls `remember()` before a round and `check(n)` after it.
    """

    def __init__(self, layout: Layout, seed: int) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in layout}
        self.nbytes = nbytes_of(layout)
        self._seed = seed
        self._pool = np.random.default_rng(seed).integers(0, 1 << 64, _POOL_WORDS, dtype=np.uint64)
        self._digests: list[int] = []

    def bytes(self) -> list[np.ndarray]:
        """Every tensor as a flat uint8 array over the same memory."""
        return [tensor.view(torch.uint8).flatten().numpy() for tensor in self.tensors.values()]

    def flat(self) -> list[torch.Tensor]:
        """Every tensor as a flat uint8 tensor over the same memory."""
        return [tensor.view(torch.uint8).flatten() for tensor in self.tensors.values()]

    def fill(self, round_: int) -> None:
        """Write the bytes of this round: no 8-byte word keeps its value."""
        for index, words in enumerate(self._words()):
            for block, offset, mask in self._blocks(index, words.size, round_):
                target = words[block]
                np.bitwise_xor(self._pool[offset : offset + target.size], mask, out=target)

    def remember(self) -> None:
        """Note a digest of every tensor, for `check` to compare with."""
        self._digests = [xxhash.xxh3_64_intdigest(words) for words in self._words()]

    def check(self, round_: int) -> None:
        """Raise unless every tensor has changed since `remember` and equals the reference of this round."""
        scratch = np.empty(_BLOCK_WORDS, dtype=np.uint64)
        for index, (name, words) in enumerate(zip(self.tensors, self._words(), strict=True)):
            if xxhash.xxh3_64_intdigest(words) == self._digests[index]:
                raise AssertionError(f"round {round_}: {name} has not changed")
            for block, offset, mask in self._blocks(index, words.size, round_):
                given = words[block]
                expected = np.bitwise_xor(self._pool[offset : offset + given.size], mask, out=scratch[: given.size])
                if not np.array_equal(given, expected):
                    raise AssertionError(f"round {round_}: {name} differs from its reference")

    def _words(self) -> list[np.ndarray]:
        return [view.view(np.uint64) for view in self.bytes()]

    def _blocks(self, index: int, num_words: int, round_: int) -> Iterator[tuple[slice, int, np.uint64]]:
        """Per block of a tensor: where it is, where its words start in the pool, and what they are xored with."""
        for start in range(0, num_words, _BLOCK_WORDS):
            key = xxhash.xxh3_64_intdigest(f"{self._seed}/{round_}/{index}/{start}".encode())
            yield slice(start, start + _BLOCK_WORDS), key % (_POOL_WORDS - _BLOCK_WORDS), np.uint64(key)


def buckets_of(sizes: Sequence[int], bucket_nbytes: int) -> list[list[int]]:
    """Indices of consecutive tensors in groups of at most `bucket_nbytes`; a larger tensor has its own group."""
    groups: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not groups or size > room:
            groups.append([])
            room = bucket_nbytes
        groups[-1].append(index)
        room -= size
    return groups
