"""The requests that a benchmark makes up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, cast

from quire.cli.bench.config import BenchConfig, Dataset
from quire.client import GenerationOptions, Message, ModelInfo, Prompt
from quire.models import notes
from quire.simulator.calibrate import vocabulary_of

TOKENS_PER_NOTE = 8


class Turn(NamedTuple):
    """A later turn of a session, whose prompt is the earlier prompt and its answer followed by new tokens."""

    pause_seconds: float
    """Time from the end of the earlier answer."""
    token_ids: list[int]


class BenchRequest(NamedTuple):
    """A request to send."""

    prompt: Prompt
    options: GenerationOptions
    arrival_seconds: float = 0.0
    """When it arrives in its trace."""
    later_turns: Sequence[Turn] = ()
    """What the same client sends after the answer; the prompt then consists of token ids."""


def make_requests(config: BenchConfig, model: ModelInfo) -> list[BenchRequest]:
    """Return the warm-up requests, followed by those to measure.

    Raises:
        ValueError: prompt and answer do not fit the model.
    """
    options = options_of(config, config.output_len)
    return [BenchRequest(prompt, options) for prompt in _prompts(config, model)]


def options_of(config: BenchConfig, max_tokens: int) -> GenerationOptions:
    """Return the options of a request for that many tokens."""
    return {"max_tokens": max_tokens, "ignore_eos": config.ignore_eos, "temperature": config.temperature}


def _prompts(config: BenchConfig, model: ModelInfo) -> Sequence[Prompt]:
    count, rng = config.num_warmups + config.num_requests, random.Random(config.seed)
    if config.dataset is Dataset.NOTES:
        return _notes_prompts(count, config.input_len, config.seed)
    return _random_prompts(config, model, count, rng)


def _random_prompts(
    config: BenchConfig, model: ModelInfo, count: int, rng: random.Random
) -> list[Sequence[int]]:
    """Return prompts of random token ids, none of them an end of sequence, with a common prefix."""
    if config.input_len + config.output_len > model.max_model_len:
        raise ValueError(
            f"input-len ({config.input_len}) and output-len ({config.output_len}) exceed"
            f" the model's {model.max_model_len} tokens"
        )
    vocabulary = vocabulary_of(model)
    shared = rng.choices(vocabulary, k=config.shared_prefix_len)
    own_len = config.input_len - config.shared_prefix_len
    return [[*shared, *rng.choices(vocabulary, k=own_len)] for _ in range(count)]


def _notes_prompts(count: int, input_len: int, seed: int) -> list[Sequence[Message]]:
    """Return conversations that ask about notes, of about ``input_len`` tokens."""
    num_facts = min(max(1, input_len // TOKENS_PER_NOTE), len(notes.ITEMS))
    examples = notes.held_out(count, num_facts, seed)
    return [cast("Sequence[Message]", example.messages) for example in examples]
