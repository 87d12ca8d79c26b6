"""An engine over a tiny model on the CPU, requests for it, and the tokens that they get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.paged_eviction import PagedEviction, Score, importance
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import GeneratedToken, Sequence, SequenceUpdate
from quire.engine.speculation.speculator import Speculator
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
CPU = torch.device("cpu")
Outputs = dict[tuple[str, int], list[int]]
"""Tokens by the id of the request and the index of the sequence."""


class RecordingRunner(ModelRunner):
    """Records the schedules of the steps that move blocks."""

    def __init__(self, model: LoadedModel, memory: KvMemory, swap_memory: KvMemory | None = None) -> None:
        super().__init__(model, memory, swap_memory)
        self.schedules: list[Schedule] = []

    def move_blocks(self, schedule: Schedule) -> None:
        self.schedules.append(schedule)
        super().move_blocks(schedule)


def make_engine(
    model: LoadedModel,
    *,
    num_blocks: int = 512,
    num_swap_blocks: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 128,
    prefers_swap: bool | None = None,
    speculator: Speculator | None = None,
    score: Score = importance,
    make_runner: Callable[[LoadedModel, KvMemory, KvMemory | None], ModelRunner] = ModelRunner,
) -> Engine:
    """Return an engine whose blocks are on the device of the model.

    Args:
        prefers_swap: whether preempted groups are swapped out if there is room; None: where that is faster.
    """
    shape, device = model.kv_shape(BLOCK_SIZE), model.module.device
    memory = KvMemory(shape, num_blocks, device)
    swap_memory = KvMemory(shape, num_swap_blocks, CPU, is_pool=False) if num_swap_blocks else None
    parts = EngineParts(
        swap_memory=swap_memory,
        speculator=speculator,
        eviction=PagedEviction(memory, score),
        runner=make_runner(model, memory, swap_memory),
    )
    limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs, max_num_batched_tokens)
    engine = Engine(model, memory, limits, parts=parts)
    if prefers_swap is not None:
        engine.preemption.prefers_swap = lambda num_tokens, num_blocks: prefers_swap
    return engine


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens of a tiny model's vocabulary, without its special ones."""
    return Random(seed * 1000 + length).choices(range(2, 320), k=length)


def make_request(name: str, prompt: list[int], **params: Any) -> Sequence:
    """Return a request for 40 tokens, even after one that ends an answer; ``params`` may say otherwise."""
    sampling = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **params})
    return Sequence(name, list(prompt), len(prompt), sampling, b"root")


def updates_of(engine: Engine, *requests: Sequence) -> Iterator[SequenceUpdate]:
    """Add requests, step to the end of all requests, and yield the updates."""
    for request in requests:
        engine.add_request(request)
    while not engine.is_idle:
        yield from engine.step()
        engine.check_conservation()


def add_tokens(outputs: Outputs, update: SequenceUpdate) -> None:
    """Add the tokens of an update to those of its sequence."""
    tokens = outputs.setdefault((update.sequence.attempt_id, update.sequence.index), [])
    tokens += [token.token_id for token in update.tokens]


def run(engine: Engine, *requests: Sequence) -> Outputs:
    """Run requests to their ends; return the new tokens of each sequence."""
    outputs: Outputs = {}
    for update in updates_of(engine, *requests):
        add_tokens(outputs, update)
    assert engine.pool.counts.used == 0
    return outputs


def generated(engine: Engine, request: Sequence) -> list[GeneratedToken]:
    """Run a request; return its tokens with their logprobs."""
    return [token for update in updates_of(engine, request) for token in update.tokens]


def check_prefix_hit(model: LoadedModel, num_equal: int) -> int:
    """Check that a prompt which begins like a cached one gets the bits of a cold start.

    Returns:
        The number of its tokens that were cached.
    """
    first = make_prompt(80)
    prompt = [*first[:num_equal], *make_prompt(30, seed=1)]
    params = {"temperature": 0.0, "max_tokens": 10, "num_logprobs": 3}
    cold = generated(make_engine(model), make_request("cold", prompt, **params))
    engine = make_engine(model)
    run(engine, make_request("first", first))
    warm = make_request("warm", prompt, **params)
    assert generated(engine, warm) == cold
    return warm.num_cached_tokens


def run_in_order(engine: Engine, *requests: Sequence) -> list[list[int]]:
    """Run requests to their ends; return the new tokens of the first sequence of each."""
    run(engine, *requests)
    return [output(request) for request in requests]


def output(sequence: Sequence) -> list[int]:
    """Return the tokens after a sequence's prompt."""
    return sequence.token_ids[sequence.num_prompt_tokens :]


def run_mixed(model: LoadedModel, kv_cache_dtype: str, block_size: int = 16) -> list[object]:
    """Return the tokens and logprobs of requests that share steps, and of the prompts of some of them."""
    # Without logprobs of prompts, a step needs the logits of one token of each sequence.
    return [*_run_mixed(model, kv_cache_dtype, block_size, 2), *_run_mixed(model, kv_cache_dtype, block_size)]


def _run_mixed(
    model: LoadedModel, kv_cache_dtype: str, block_size: int, num_prompt_logprobs: int | None = None
) -> list[object]:
    memory = KvMemory(model.kv_shape(block_size, kv_cache_dtype), 256, CPU)
    limits = SchedulerConfig(block_size, max_num_seqs=16, max_num_batched_tokens=37)
    engine = Engine(model, memory, limits)
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=20,
        ignore_eos=True,
        num_logprobs=3,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    sequences = []
    for index, length in enumerate((1, 16, 50, 90)):
        prompt = Random(index).choices(range(2, 320), k=length)
        sequences.append(Sequence(f"request-{index}", prompt, length, params, b"root"))
    sampled = [(update.sequence.attempt_id, update.tokens) for update in updates_of(engine, *sequences)]
    return [*sampled, *(sequence.prompt_logprobs for sequence in sequences)]
