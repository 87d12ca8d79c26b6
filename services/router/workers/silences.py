"""Measures how long workers are silent, and finds those that have vanished.

A worker reports all the time. When its reports stop, the router tries to connect again. gRPC accepts
connections in its own threads, so this succeeds even if the worker's event loop hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from quire.services.router.workers.worker import Worker, has_substitute

TICK_SECONDS = 0.1
"""Interval at which silences are measured."""


class Silences:
    """Measures the silences of all workers that are not set aside.

    Args:
        clock: returns the time in seconds.
        reach: returns once a new connection to a worker has been made.
    """

    def __init__(self, clock: Callable[[], float], reach: Callable[[Worker], Awaitable[None]]) -> None:
        self._clock = clock
        self._reach = reach
        self._ticked_at = clock()
        self._reaching: dict[Worker, asyncio.Task[None]] = {}

    def tick(self, workers: Sequence[Worker]) -> list[Worker]:
        """Measure silences since the last tick; return the workers that have vanished (``vanished``).

        If this process itself was late, reports wait to be read, so only the time between two ticks counts.
        """
        now = self._clock()
        seconds, self._ticked_at = min(now - self._ticked_at, 2 * TICK_SECONDS), now
        measured = [worker for worker in workers if not worker.health.is_set_aside]
        for worker in self._reaching.keys() - set(measured):
            self._reaching.pop(worker).cancel()
        for worker in measured:
            worker.health.passed(seconds)
            if worker.health.is_late and worker not in self._reaching:
                self._reaching[worker] = asyncio.create_task(self._hear_if_reached(worker))
        return vanished(workers)

    async def close(self) -> None:
        """End the attempts to connect."""
        for task in self._reaching.values():
            task.cancel()
        await asyncio.gather(*self._reaching.values(), return_exceptions=True)

    async def _hear_if_reached(self, worker: Worker) -> None:
        try:
            await self._reach(worker)
            worker.health.heard()
        finally:
            self._reaching.pop(worker, None)


def vanished(workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers that have vanished and are not yet set aside, if others can take over.

    If all workers of a role are silent, this process or its network is the likely reason, and no other worker
    could take over. Then only the probes decide.
    """
    silent = [each for each in workers if each.health.has_vanished and not each.health.is_set_aside]
    return [worker for worker in silent if has_substitute(worker, workers)]
