"""Real text for the demo: what the trainer learns from, and what the replicas are asked.

SmolLM2 brings its own tokenizer; the models with random weights read bytes.
"""

from __future__ import annotations

import os
from typing import Protocol, cast

from wsync.demo.models import SPECS, smollm2_file

# Abraham Lincoln, Gettysburg, 1863 (public domain).
LESSON = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those "
    "who here gave their lives that that nation might live. It is altogether fitting and proper that we should do this."
)
PROMPTS = (
    "Four score and seven years ago",
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time there was a",
)


class Tokenizer(Protocol):
    """Text to token ids."""

    def encode(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def make_tokenizer(model_name: str) -> Tokenizer:
    """The tokenizer that fits a model of `models.SPECS`."""
    if not SPECS[model_name].has_real_weights:
        return ByteTokenizer()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    file = smollm2_file()
    return cast(Tokenizer, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
