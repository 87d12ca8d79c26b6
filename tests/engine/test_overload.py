"""More transfers than a pool can hold: the batch stays as large as without transfers, and nobody starves."""

from __future__ import annotations

import random
from statistics import mean
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_memory import KvMemory
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence
from quire.kvindex.block_hash import block_hash
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import SamplingParams

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, TOKEN = 16, 256, 64, 5
NUM_STEPS, NUM_WARM_UP_STEPS, NUM_QUEUED = 1200, 200, 8
MAX_TOKENS = 200


class FirstTokens:
    """Always samples the same token, in no time."""

    def move_blocks(self, schedule: Any) -> None:
        pass

    def prepare(self, scheduled: list[Any]) -> list[Any]:
        return scheduled

    def forward(self, scheduled: list[Any]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full((len(scheduled),), TOKEN), VOCAB_SIZE).float()


def make_engine() -> Engine:
    model: Any = SimpleNamespace(max_position_embeddings=10_000, eos_token_ids=frozenset({1}), window=None)
    shape = KvShape(1, 1, BLOCK_SIZE, 1, "float32")
    cpu = torch.device("cpu")
    engine = Engine(
        model,
        KvMemory(shape, NUM_BLOCKS, cpu),
        SchedulerConfig(BLOCK_SIZE, max_num_seqs=64, max_num_batched_tokens=2048, preemption="swap"),
        block_hash,
        parts=EngineParts(swap_memory=KvMemory(shape, NUM_BLOCKS, cpu), clock=lambda: 0.0),
    )
    engine.runner = FirstTokens()  # type: ignore[assignment]
    return engine


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


def test_a_group_that_lacks_blocks_is_matched_with_the_cache_when_it_may_fit() -> None:
    engine = make_engine()
    num_matches = 0
    match = engine.tables.take_cached_prefix

    def counted(sequence: Sequence, max_tokens: int) -> None:
        nonlocal num_matches
        num_matches += sequence.attempt_id == "blocked"
        match(sequence, max_tokens)

    engine.tables.take_cached_prefix = counted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    cached = [2] * (100 * BLOCK_SIZE)
    for name, token_ids in (
        ("cached", cached),
        ("running", [3] * (120 * BLOCK_SIZE)),
        ("blocked", [*cached, *[4] * (100 * BLOCK_SIZE)]),
    ):
        engine.add_request(Sequence(name, token_ids, len(token_ids), params, b"root"))
        if name == "cached":
            while not engine.is_idle:
                engine.step()
    for _ in range(20):
        engine.step()
    assert num_matches == 1
    while not engine.is_idle:
        engine.step()
    assert num_matches == 2
    engine.check_conservation()
    assert engine.pool.counts.used == 0
