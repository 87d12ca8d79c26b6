"""Prompts in the demo model's language."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tokenizers import Tokenizer

from quire.models.notes import ITEMS, sample_notes, text
from quire.models.source import demo_model_path

Prompts = Callable[[int, int], list[int]]
"""Returns the tokens of a prompt of a given length, with a seed."""


def make_prompts() -> Prompts:
    """Return a function that makes prompts: notes in the demo model's language, truncated to the length."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))

    def prompt(length: int, seed: int) -> list[int]:
        random, tokens = Random(seed), list[int]()
        while len(tokens) < length:
            num_notes = min(len(ITEMS), length // 8 + 1)
            tokens += tokenizer.encode(text(sample_notes(random, num_notes))).ids
        return tokens[:length]

    return prompt
