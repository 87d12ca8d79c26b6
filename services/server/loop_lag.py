"""Measures how late the event loop runs its callbacks; every request on it waits that much longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry, Histogram

INTERVAL_SECONDS = 0.25
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class LoopLagMetrics:
    """Holds the histogram of the event loop's lag."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.lag = Histogram(
            "quire_event_loop_lag_seconds",
            "How much later than asked the event loop wakes a sleeper, four times a second.",
            buckets=_SECONDS,
            registry=registry,
        )


@asynccontextmanager
async def loop_lag_observed(metrics: LoopLagMetrics) -> AsyncIterator[None]:
    """Observe the running loop's lag every ``INTERVAL_SECONDS`` until the context ends."""
    watching = asyncio.create_task(_watch(metrics))
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(metrics: LoopLagMetrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        metrics.lag.observe(max(0.0, loop.time() - due))
