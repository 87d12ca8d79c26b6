"""Requests whose answers are far longer than a window, and what may be given back while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from tests.testing import tiny_engine
from tests.testing.tiny_engine import make_prompt, output

WINDOW, NUM_NEW = 24, 200
"""The window of the tiny models that have one, and the number of tokens of an answer."""
CheckGreedy = Callable[..., None]


def make_request(name: str, length: int, prompt_seed: int = 0, **params: Any) -> Sequence:
    values = {"temperature": 0.0, "max_tokens": NUM_NEW, **params}
    return tiny_engine.make_request(name, make_prompt(length, prompt_seed), **values)


def finish(engine: Engine) -> int:
    """Step to the end; return the most blocks that were used at once. What holds nothing becomes NaN."""
    most = 0
    while not engine.is_idle:
        engine.step()
        engine.check_conservation()
        most = max(most, engine.pool.counts.used)
        engine.memory.blocks[_free(engine)] = float("nan")
    assert engine.pool.counts.used == 0
    return most


def check_preemption(
    engine: Engine, num_samples: int, *, is_swapped: bool, architecture: str, check_greedy: CheckGreedy
) -> None:
    """Run four prompts with more equal samples than fit; they must be preempted, and get their tokens."""
    requests = [make_request(str(index), 50 + 20 * index, index, n=num_samples) for index in range(4)]
    for request in requests:
        engine.add_request(request)
    finish(engine)
    assert engine.preemption.counts[not is_swapped] > 0
    for request in requests:
        check_greedy(architecture, request.token_ids[: request.num_prompt_tokens], output(request), NUM_NEW)


def compute_and_reserve(prefill: Engine, decode: Engine, request: Sequence) -> None:
    """Let one engine compute a prompt, and another, which has accepted it, reserve its blocks."""
    prefill.add_request(request)
    while not request.status.is_finished:
        prefill.step()
    reserved: list[bool] = []
    decode.transfers.reserve(request.attempt_id, reserved.append)
    decode.transfers.grant_blocks()
    assert reserved


def _free(engine: Engine) -> list[int]:
    """Return the blocks, or the frames where blocks have several, that hold nothing."""
    tables, pool = engine.memory.frame_tables, engine.pool
    num_ids = pool.num_blocks if tables is None else len(tables)
    held = {b for b in range(num_ids) if pool.ref_cnt(b) or pool.hash_of(b)}
    if tables is not None:
        held = {frame for block_id in held for frame in tables[block_id].tolist()}
    return [index for index in range(len(engine.memory.blocks)) if index not in held]
