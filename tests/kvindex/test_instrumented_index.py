"""What the metrics of an index say of look-ups and publishes, also of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.circuit_breaker import BreakerState, CircuitBreaker
from quire.kvindex.guarded_index import Fallback
from quire.kvindex.index import Holding, IndexFullError, LeaseLostError
from quire.kvindex.instrumented_index import (
    IndexMetrics,
    InstrumentedIndex,
    InstrumentedLease,
    PublisherMetrics,
)
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.worker_record import WorkerRecord

HASHES = [bytes([index]) * 16 for index in range(4)]


def holding(name: str, num_blocks: int) -> Holding:
    return Holding(WorkerRecord(name, "prefill", f"{name}:1", "epoch", "fingerprint"), num_blocks)


class Index:
    """Answers or raises, and takes two seconds of the clock."""

    def __init__(self, answer: list[Holding] | BaseException) -> None:
        self.answer = answer
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        self.now += 2.0
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Setup:
    """A measured index, and the values of its metrics."""

    def __init__(self, answer: list[Holding] | BaseException) -> None:
        self.registry, self.breaker = CollectorRegistry(), CircuitBreaker(max_failures=1)
        self.metrics = IndexMetrics(self.registry, self.breaker)
        inner = Index(answer)
        self.index = InstrumentedIndex(inner, self.metrics, inner.clock)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"quire_index_{name}", labels)

    def seconds(self) -> dict[str, float | None]:
        """Return the measured seconds by result."""
        results = ("hit", "miss", "failed")
        return {result: self.value("lookup_seconds_sum", result=result) for result in results}


async def test_the_deepest_holder_is_the_share_that_was_found() -> None:
    setup = Setup([holding("a", 1), holding("b", 3), holding("c", 2)])
    assert len(await setup.index.look_up(HASHES)) == 3
    assert setup.seconds() == {"hit": 2.0, "miss": 0.0, "failed": 0.0}
    assert setup.value("match_ratio_sum") == 0.75
    assert setup.value("lookup_blocks_sum") == 4


async def test_a_miss_is_a_share_of_nothing_and_no_blocks_are_no_share() -> None:
    setup = Setup([])
    await setup.index.look_up(HASHES)
    assert (setup.value("match_ratio_count"), setup.value("match_ratio_sum")) == (1, 0)
    await setup.index.look_up([])
    assert setup.value("match_ratio_count") == 1
    assert setup.value("lookup_seconds_count", result="miss") == 2


@pytest.mark.parametrize("error", [OSError("down"), asyncio.CancelledError()])
async def test_a_failure_is_measured_and_passed_on(error: BaseException) -> None:
    setup = Setup(error)
    with pytest.raises(type(error)):
        await setup.index.look_up(HASHES)
    assert setup.seconds() == {"hit": 0.0, "miss": 0.0, "failed": 2.0}
    assert setup.value("match_ratio_count") == 0


def test_the_breaker_and_the_fallbacks_are_seen_from_the_start() -> None:
    setup = Setup([])
    assert {setup.value("fallback_total", reason=reason) for reason in Fallback} == {0}
    setup.metrics.fallback(Fallback.TIMEOUT)
    assert setup.value("fallback_total", reason="timeout") == 1
    assert setup.value("breaker_state") == BreakerState.CLOSED
    setup.breaker.failed()
    assert setup.value("breaker_state") == BreakerState.OPEN


@pytest.mark.parametrize(
    ("error", "fenced", "full"), [(LeaseLostError(), 2, 0), (IndexFullError(), 0, 1), (OSError(), 0, 0)]
)
async def test_a_publish_that_failed_adds_no_entries(error: Exception, fenced: int, full: int) -> None:
    registry = CollectorRegistry()
    metrics = PublisherMetrics(registry, PublishLedger(clock=lambda: 0.0))
    failed = AsyncMock(side_effect=error)
    failing_lease: Any = SimpleNamespace(publish=failed, beat=failed)
    lease = InstrumentedLease(failing_lease, metrics)
    for failing in (lease.publish(HASHES), lease.beat()):
        with pytest.raises(type(error)):
            await failing
    values = [
        registry.get_sample_value(f"quire_index_{name}_total", labels)
        for name, labels in (("fenced", {}), ("full", {}), ("publish_entries", {"op": "publish"}))
    ]
    assert values == [fenced, full, 0]
