"""Measures how late the event loop runs its callbacks; every request on it waits that much longer."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Histogram

from quire.services.server.background import in_background

INTERVAL_SECONDS = 0.25
STUCK_SECONDS = 5.0
"""Lag from which the event loop counts as stuck: far more than a busy machine causes."""
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LoopLagMetrics:
    """The event loop's lag: a histogram of past delays, and the present one, which any thread may ask for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Histogram(
            "quire_event_loop_lag_seconds",
            "Delay of the event loop, measured four times a second.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.due = math.inf
        """When the sleeper is to wake, a reading of ``time.monotonic``."""

    @property
    def late_seconds(self) -> float:
        """Seconds by which the loop is late in waking the sleeper; below 0 before that is due."""
        return time.monotonic() - self.due


@asynccontextmanager
async def loop_lag_observed(metrics: LoopLagMetrics) -> AsyncIterator[LoopLagMetrics]:
    """Observe the running loop's lag every ``INTERVAL_SECONDS`` until the context ends."""
    try:
        async with in_background(_watch(metrics)):
            yield metrics
    finally:
        metrics.due = math.inf


async def _watch(metrics: LoopLagMetrics) -> None:
    while True:
        metrics.due = time.monotonic() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        metrics.lag.observe(max(0.0, time.monotonic() - metrics.due))
