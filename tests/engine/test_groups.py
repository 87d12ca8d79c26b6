"""Parallel samples: the same tokens as one by one, over shared blocks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.request_errors import RequestTooLongError
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence
from quire.sampling.params import SamplingParams

BLOCK_SIZE = 16
CPU = torch.device("cpu")
TinyModel = Callable[[str], Path]


def hash_block(parent: bytes, tokens: list[int]) -> bytes:
    return hashlib.sha256(parent + str(tokens).encode()).digest()[:16]


def make_engine(
    model: LoadedModel,
    *,
    num_blocks: int = 512,
    num_swap_blocks: int = 0,
    budget: int = 128,
    max_num_seqs: int = 64,
    **config: object,
) -> Engine:
    shape = model.kv_shape(BLOCK_SIZE)
    swap_memory = KvMemory(shape, num_swap_blocks, CPU) if num_swap_blocks else None
    limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs, budget, **config)  # type: ignore[arg-type]
    parts = EngineParts(swap_memory=swap_memory)
    return Engine(model, KvMemory(shape, num_blocks, CPU), limits, hash_block, parts=parts)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    return Random(seed * 1000 + length).choices(range(2, 320), k=length)


def make_request(name: str, prompt: list[int], **params: object) -> Sequence:
    values = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 40, "ignore_eos": True, **params}
    return Sequence(name, list(prompt), len(prompt), SamplingParams(**values), b"root")  # type: ignore[arg-type]


def run(engine: Engine, requests: list[Sequence]) -> dict[tuple[str, int], list[int]]:
    """Run requests to their ends; return the tokens of each sequence."""
    for request in requests:
        engine.add_request(request)
    outputs: dict[tuple[str, int], list[int]] = {}
    while not engine.is_idle:
        for sequence, _, tokens, *_ in engine.step():
            outputs.setdefault((sequence.attempt_id, sequence.index), []).extend(t.token_id for t in tokens)
        engine.check_conservation()
    assert engine.pool.counts.used == 0
    return outputs


@pytest.mark.parametrize("length", [1, 16, 40])
def test_each_of_eight_samples_is_what_its_seed_gives_alone(
    load: Callable[[str], LoadedModel], length: int
) -> None:
    prompt = make_prompt(length)
    together = run(make_engine(load("llama")), [make_request("r", prompt, n=8, seed=70)])
    for index in range(8):
        alone = run(make_engine(load("llama")), [make_request("a", prompt, seed=70 + index)])
        assert together["r", index] == alone["a", 0]
    assert len({tuple(tokens) for tokens in together.values()}) == 8


def test_samples_share_the_prompt_and_copy_only_its_last_block(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"))
    engine.add_request(make_request("r", make_prompt(100), n=8))
    while not engine.groups["r"].is_forked:
        engine.step()
    assert engine.pool.counts.used == 7
    schedules = []
    move_blocks = engine.runner.move_blocks
    engine.runner.move_blocks = lambda schedule: (schedules.append(schedule), move_blocks(schedule))[1]  # type: ignore[method-assign]
    engine.step()
    # Six full blocks for all, and the seventh once for each: the last owner keeps the original.
    assert engine.pool.counts.used == 6 + 8
    assert [len(schedule.copies) for schedule in schedules] == [7]


def test_what_can_never_fit_is_refused_at_once(load: Callable[[str], LoadedModel]) -> None:
    engine = make_engine(load("llama"), num_blocks=10)
    with pytest.raises(RequestTooLongError, match="take 13 blocks; this worker has 10: ask for fewer"):
        engine.add_request(make_request("r", make_prompt(20), n=4))
    with pytest.raises(RequestTooLongError, match="8 sequences of one request; this worker runs at most 4"):
        make_engine(load("llama"), max_num_seqs=4).add_request(make_request("r", make_prompt(20), n=8))
    assert run(engine, [make_request("r", make_prompt(20), n=2)])
