"""Requests whose answers are far longer than a window, and what may be given back while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.engine import Engine
from quire.engine.sequences.sequence import Sequence
from tests.testing import tiny_engine
from tests.testing.tiny_engine import make_prompt

WINDOW, NUM_NEW = 24, 300
"""The window of the tiny models that have one, and the number of tokens of an answer."""
Expected = Callable[[str, list[int], int], list[int]]


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


def _free(engine: Engine) -> list[int]:
    """Return the blocks, or the frames where blocks have several, that hold nothing."""
    tables, pool = engine.memory.frame_tables, engine.pool
    num_ids = pool.num_blocks if tables is None else len(tables)
    held = {b for b in range(num_ids) if pool.ref_cnt(b) or pool.hash_of(b)}
    if tables is not None:
        held = {frame for block_id in held for frame in tables[block_id].tolist()}
    return [index for index in range(len(engine.memory.blocks)) if index not in held]
