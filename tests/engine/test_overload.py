"""More transfers than a pool can hold: the batch stays as large as without them, and no request starves."""

from __future__ import annotations

import random
from statistics import mean
from typing import NamedTuple

import pytest

from quire.engine.engine import Engine
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import TOKEN, make_constant_engine
from tests.testing.tiny_engine import run

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 16, 256, 64
NUM_STEPS, NUM_WARM_UP_STEPS, NUM_QUEUED = 1200, 200, 8
MAX_TOKENS = 200


def make_engine() -> Engine:
    return make_constant_engine(
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_blocks=NUM_BLOCKS,
        num_swap_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=10_000,
        clock=lambda: 0.0,
    )


class Load(NamedTuple):
    """What became of an engine that always has more requests than blocks."""

    mean_batch: float
    longest_gap: int
    """Most steps between two tokens of one answer."""


def overload(*, has_transfers: bool) -> Load:
    engine, rng = make_engine(), random.Random(1)
    num_requests = 0
    granted: list[str] = []
    last_token: dict[str, int] = {}
    longest_gap = 0
    batches = []

    def queue_request() -> None:
        nonlocal num_requests
        num_requests += 1
        name, length = str(num_requests), rng.randint(30, 150)
        params = SamplingParams(temperature=0, max_tokens=rng.randint(20, MAX_TOKENS), ignore_eos=True)
        prompt = Sequence(name, rng.choices(range(2, VOCAB_SIZE), k=length), length, params, b"root")
        if not has_transfers:
            engine.add_request(prompt)
            return
        engine.transfers.accept(prompt)
        engine.transfers.reserve(name, lambda is_granted: granted.append(name) if is_granted else None)
        engine.transfers.grant_blocks()

    def num_queued() -> int:
        if has_transfers:
            return engine.transfers.num_waiting + len(granted)
        return len(engine.queues.waiting)

    for step in range(NUM_STEPS):
        while num_queued() < NUM_QUEUED:
            queue_request()
        while granted:  # the blocks arrive at once
            engine.transfers.admit(granted.pop(0), TOKEN)
        for update in engine.step():
            name = update.sequence.attempt_id
            if update.tokens:
                longest_gap = max(longest_gap, step - last_token.get(name, step))
                last_token[name] = step
            if update.status.is_finished:
                del last_token[name]
        batches.append(engine.num_stepped)
        engine.check_conservation()
    gaps = [NUM_STEPS - step for step in last_token.values()]
    return Load(mean(batches[NUM_WARM_UP_STEPS:]), max(longest_gap, *gaps))


def test_the_batch_under_transfers_is_that_without() -> None:
    with_transfers, without = overload(has_transfers=True), overload(has_transfers=False)
    assert with_transfers.mean_batch > 0.9 * without.mean_batch
    # Preempted answers go on when those that ran at the time have ended.
    assert with_transfers.longest_gap < 2 * MAX_TOKENS


def test_a_group_that_lacks_blocks_is_matched_with_the_cache_when_it_may_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()
    num_matches = 0
    match = BlockTables.take_cached_prefix

    def counted(tables: BlockTables, sequence: Sequence, max_tokens: int) -> None:
        nonlocal num_matches
        num_matches += sequence.attempt_id == "blocked"
        match(tables, sequence, max_tokens)

    monkeypatch.setattr(BlockTables, "take_cached_prefix", counted)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    cached = [2] * (100 * BLOCK_SIZE)
    for name, token_ids in (
        ("cached", cached),
        ("running", [3] * (120 * BLOCK_SIZE)),
        ("blocked", [*cached, *[4] * (100 * BLOCK_SIZE)]),
    ):
        engine.add_request(Sequence(name, token_ids, len(token_ids), params, b"root"))
        if name == "cached":
            run(engine)
    for _ in range(20):
        engine.step()
    assert num_matches == 1
    run(engine)
    assert num_matches == 2
