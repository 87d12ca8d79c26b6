"""Tiny random models of transformers, and the tokens that it generates with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@cache
def load_reference(folder: Path) -> Any:
    """Return the model of a folder in float32, as transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def generate_greedy(model: Any, prompt: list[int], num_new: int, **options: Any) -> list[int]:
    """Return the next ``num_new`` greedy tokens of transformers' generate; none of them ends the answer."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        eos_token_id=None,
        **options,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def search_beams(
    model: Any, prompt: list[int], width: int, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Return the answers of transformers' beam search, the best first, and their scores."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    eos = model.generation_config.eos_token_id
    rows = output.sequences[:, len(prompt) :].tolist()
    answers = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    return answers, output.sequences_scores.tolist()
