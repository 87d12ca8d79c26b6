"""Look-ups that fail or hang: they cost little, are counted, and are given up for a while."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisClusterException

from quire.kvindex import guarded_index
from quire.kvindex.circuit_breaker import BreakerState, CircuitBreaker
from quire.kvindex.guarded_index import Fallback, GuardedIndex
from quire.kvindex.index import Holding, IndexFullError, LeaseLostError
from quire.kvindex.instrumented_index import (
    IndexMetrics,
    InstrumentedIndex,
    InstrumentedLease,
    PublisherMetrics,
)
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.redis_index import RedisIndex, reader_client
from quire.services.local.redis_process import RedisProcess
from tests.testing.manual_clock import ManualClock
from tests.testing.memory_index import MemoryLease, MemoryStore
from tests.testing.until import until

HASHES = [bytes([index]) * 16 for index in range(4)]


class ScriptedIndex:
    """Answers, raises, or hangs when the answer is None."""

    def __init__(self) -> None:
        self.answer: Any = []
        self.num_calls = 0

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        self.num_calls += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return list(self.answer)


class Guarded:
    """A guarded and instrumented index, and what it reports."""

    def __init__(self) -> None:
        self.clock, self.inner, self.registry = ManualClock(), ScriptedIndex(), CollectorRegistry()
        self.breaker = CircuitBreaker(clock=self.clock)
        metrics = IndexMetrics(self.registry, self.breaker)
        self.index = GuardedIndex(InstrumentedIndex(self.inner, metrics), self.breaker, metrics.fallback)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"quire_index_{name}", labels)


@pytest.fixture
def guarded() -> Guarded:
    return Guarded()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "timeout"),
        *((kind("down"), "error") for kind in (RedisConnectionError, RedisClusterException, OSError)),
    ],
)
async def test_an_index_that_fails_is_not_asked_for_a_while(
    answer: Any, reason: str, guarded: Guarded, record: Any, caplog: pytest.LogCaptureFixture
) -> None:
    good = [Holding(record("a"), 2)]
    guarded.inner.answer = answer
    for _ in range(7):
        assert await guarded.index.look_up(HASHES) is None
    assert guarded.inner.num_calls == 5
    assert guarded.metric("fallback_total", reason=reason) == 5
    assert guarded.metric("fallback_total", reason="breaker_open") == 2
    assert guarded.metric("breaker_state") == BreakerState.OPEN
    assert [each.message for each in caplog.records] == ["index_given_up"]
    guarded.clock.now += 1.0
    assert guarded.metric("breaker_state") == BreakerState.HALF_OPEN
    assert await guarded.index.look_up(HASHES) is None
    assert await guarded.index.look_up(HASHES) is None
    assert guarded.inner.num_calls == 6
    guarded.inner.answer = good
    guarded.clock.now += 1.0
    for _ in range(3):
        assert await guarded.index.look_up(HASHES) == good
    assert guarded.metric("breaker_state") == BreakerState.CLOSED
    assert guarded.metric("lookup_seconds_count", result="failed") == 6
    assert guarded.metric("lookup_seconds_count", result="hit") == 3
    assert guarded.metric("match_ratio_sum") == 1.5
    assert guarded.metric("lookup_blocks_sum") == 9 * len(HASHES)


async def test_a_trial_that_is_cancelled_is_not_the_last(guarded: Guarded) -> None:
    for _ in range(5):
        guarded.breaker.failed()
    guarded.clock.now += 1.0
    guarded.inner.answer = None
    trial = asyncio.create_task(guarded.index.look_up(HASHES))
    await asyncio.sleep(0)
    trial.cancel()
    await asyncio.wait([trial])
    after_cancel = guarded.breaker.state
    assert after_cancel is BreakerState.OPEN
    guarded.clock.now += 1.0
    guarded.inner.answer = []
    await guarded.index.look_up(HASHES)
    assert guarded.breaker.state is BreakerState.CLOSED


async def test_a_redis_that_hangs_costs_only_the_budget(
    redis_process: RedisProcess, redis_backend: Any, record: Any
) -> None:
    lease = redis_backend.lease()
    await lease.join(record("a"))
    await lease.publish(HASHES)
    clock, fallbacks = ManualClock(), list[Fallback]()
    client = reader_client(redis_process.router_url)
    index = GuardedIndex(RedisIndex(client), CircuitBreaker(clock=clock), fallbacks.append)
    try:
        await until(lambda: index.look_up(HASHES))
        fallbacks.clear()
        os.kill(redis_process.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(60):
                assert [await index.look_up(HASHES) for _ in range(8)] == [None] * 8
        finally:
            os.kill(redis_process.pid, signal.SIGCONT)
        assert fallbacks == [Fallback.TIMEOUT] * 5 + [Fallback.BREAKER_OPEN] * 3
        clock.now += 1.0

        async def is_back() -> bool:
            clock.now += 1.0
            return [each.num_blocks for each in await index.look_up(HASHES) or ()] == [len(HASHES)]

        await until(is_back)
    finally:
        await client.aclose()


NUM_LOOK_UPS = 300


async def look_ups(index: GuardedIndex, number: int) -> list[list[Holding] | None]:
    async with asyncio.timeout(20):
        return await asyncio.gather(*(index.look_up(HASHES) for _ in range(number)))


async def test_hundreds_of_look_ups_at_once_all_get_their_answer(
    redis_process: RedisProcess, redis_backend: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default limit of the client's connections, redis-py refused those beyond it."""
    # On a busy machine Redis and this process may be late.
    monkeypatch.setattr(guarded_index, "BUDGET_SECONDS", 5.0)
    monkeypatch.setattr(guarded_index, "TURN_SECONDS", 5.0)
    lease = redis_backend.lease()
    await lease.join(record("a"))
    await lease.publish(HASHES)
    fallbacks = list[Fallback]()
    client = reader_client(redis_process.router_url)
    num_before = len(await redis_backend.client.client_list())
    try:
        index = GuardedIndex(RedisIndex(client), CircuitBreaker(), fallbacks.append)
        for answer in await look_ups(index, NUM_LOOK_UPS):
            assert [each.num_blocks for each in answer or ()] == [len(HASHES)]
        assert fallbacks == []
        num_opened = len(await redis_backend.client.client_list()) - num_before
        assert num_opened <= guarded_index.NUM_AT_ONCE
    finally:
        await client.aclose()


async def test_look_ups_that_get_no_turn_in_time_continue_without_the_index(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_index, "BUDGET_SECONDS", 20.0)
    monkeypatch.setattr(guarded_index, "TURN_SECONDS", 0.01)
    guarded.inner.answer = None
    running = [asyncio.create_task(guarded.index.look_up(HASHES)) for _ in range(guarded_index.NUM_AT_ONCE)]
    await asyncio.sleep(0)
    assert await look_ups(guarded.index, 20) == [None] * 20
    assert guarded.metric("fallback_total", reason="busy") == 20
    assert guarded.breaker.state is BreakerState.CLOSED
    assert guarded.inner.num_calls == guarded_index.NUM_AT_ONCE
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    guarded.inner.answer = []
    assert await look_ups(guarded.index, 20) == [[]] * 20


async def test_look_ups_that_wait_for_a_turn_do_not_wait_for_a_redis_that_hangs(
    redis_process: RedisProcess, redis_backend: Any
) -> None:
    """Those that are late return their connections."""
    fallbacks = list[Fallback]()
    client = reader_client(redis_process.router_url)
    index = GuardedIndex(RedisIndex(client), CircuitBreaker(), fallbacks.append)

    async def answers() -> bool:
        return await index.look_up(HASHES) is not None

    try:
        await until(answers)
        fallbacks.clear()
        os.kill(redis_process.pid, signal.SIGSTOP)
        try:
            assert await look_ups(index, NUM_LOOK_UPS) == [None] * NUM_LOOK_UPS
        finally:
            os.kill(redis_process.pid, signal.SIGCONT)
        assert Fallback.BUSY not in fallbacks
        # Each of the first failures lets one more look-up in, until the breaker opens.
        num_asked = NUM_LOOK_UPS - fallbacks.count(Fallback.BREAKER_OPEN)
        assert num_asked < 2 * guarded_index.NUM_AT_ONCE
        await until(answers)
    finally:
        await client.aclose()


async def test_errors_of_the_program_are_not_hidden(guarded: Guarded) -> None:
    guarded.inner.answer = KeyError("bug")
    with pytest.raises(KeyError):
        await guarded.index.look_up(HASHES)


class FullLease(MemoryLease):
    """A lease on an index without room."""

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        raise IndexFullError


async def test_publishing_is_counted(backend: Any, record: Any) -> None:
    registry, ledger = CollectorRegistry(), PublishLedger(clock=lambda: 5.0)
    metrics = PublisherMetrics(registry, ledger)
    lease = InstrumentedLease(backend.lease(), metrics)
    ledger.restart()
    ledger.stored(HASHES)
    await lease.join(record("a"))
    await lease.publish(HASHES)
    await lease.beat()
    await lease.evict(HASHES[3:])
    await lease.leave()
    for call in (lease.beat(), lease.publish(HASHES)):
        with pytest.raises(LeaseLostError):
            await call
    while await backend.num_entries():
        await lease.sweep()
    with pytest.raises(IndexFullError):
        await InstrumentedLease(FullLease(MemoryStore(), 30.0), metrics).publish(HASHES)
    samples = {
        ("publish_entries_total", "publish"): 4.0,
        ("publish_entries_total", "evict"): 1.0,
        ("publish_entries_total", "sweep"): 3.0,
        ("fenced_total", None): 2.0,
        ("full_total", None): 1.0,
        ("publish_queue", None): 4.0,
        ("publish_lag_seconds", None): 0.0,
    }
    for (name, op), expected in samples.items():
        assert registry.get_sample_value(f"quire_index_{name}", {"op": op} if op else {}) == expected
