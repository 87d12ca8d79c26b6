"""The lag of the event loop, measured while something blocks it."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from quire.services.server import loop_lag
from quire.services.server.loop_lag import LoopLagMetrics, loop_lag_observed
from tests.testing.until import until

BLOCKED_SECONDS = 0.05


async def test_a_blocked_loop_is_late_by_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL_SECONDS", 0.001)
    registry = CollectorRegistry()

    def value(name: str) -> float:
        return registry.get_sample_value(f"quire_event_loop_lag_seconds_{name}") or 0.0

    async with loop_lag_observed(LoopLagMetrics(registry)), asyncio.timeout(5):
        await until(lambda: value("count"))
        before = value("sum")
        time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251 - this is what the metric is for
        num_before = value("count")
        await until(lambda: value("count") > num_before)
        assert value("sum") - before >= BLOCKED_SECONDS - 0.002
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is observed after the context"
