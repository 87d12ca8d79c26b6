"""Tells a worker that has vanished from one that is late, by its signs of life.

A worker reports all the time. When its reports stop, the router tries to connect again: gRPC answers in
threads of its own, so this succeeds even if the worker's event loop hangs. Reports and new connections are
signs of life. A worker has vanished once it has been silent for several times as long as it was lately.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

TICK_SECONDS = 0.1
"""Interval at which silences are measured."""
LATE_SECONDS = 0.8
"""Silence after which a worker is late: others are preferred, and the router tries to connect again."""
LEAST_LIMIT_SECONDS = 1.6
"""Silence after which a worker has vanished if it has been punctual."""
LIMIT_FACTOR = 3.0
"""A worker has vanished if it is silent for this many times its longest silence."""
HALF_LIFE_SECONDS = 10.0
"""Time in which a past silence loses half of its weight."""


@dataclass(slots=True)
class Pulse:
    """The silences of one worker.

    Attributes:
        silence: seconds since the last sign of life.
        longest: longest silence that a sign of life has ended; it shrinks with time.
    """

    silence: float = 0.0
    longest: float = 0.0

    @property
    def is_late(self) -> bool:
        """Whether a sign of life is overdue."""
        return self.silence >= LATE_SECONDS

    @property
    def has_stopped(self) -> bool:
        """Whether the silence is far longer than others were."""
        return self.silence >= max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * self.longest)

    def wait(self, seconds: float) -> None:
        """Let seconds pass without a sign of life."""
        self.silence += seconds
        self.longest *= 0.5 ** (seconds / HALF_LIFE_SECONDS)

    def hear(self) -> None:
        """End the silence; remember its length unless the worker seemed to have vanished."""
        if not self.has_stopped:
            self.longest = max(self.longest, self.silence)
        self.silence = 0.0


class Watched(Protocol):
    """A worker whose silences are measured."""

    pulse: Pulse


W = TypeVar("W", bound=Watched)


class Pulses(Generic[W]):
    """Measures the silences of all workers.

    Args:
        clock: returns the time in seconds.
        reach: returns once a new connection to a worker has been made.
    """

    def __init__(self, clock: Callable[[], float], reach: Callable[[W], Awaitable[None]]) -> None:
        self._clock = clock
        self._reach = reach
        self._ticked_at = clock()
        self._reaching: dict[W, asyncio.Task[None]] = {}

    def tick(self, workers: list[W]) -> list[W]:
        """Measure silences since the last tick; return the workers that have vanished.

        If this process itself was late, reports wait to be read, so only the time between two ticks counts.
        """
        now = self._clock()
        seconds, self._ticked_at = min(now - self._ticked_at, 2 * TICK_SECONDS), now
        for worker in self._reaching.keys() - set(workers):
            self._reaching.pop(worker).cancel()
        for worker in workers:
            worker.pulse.wait(seconds)
            if worker.pulse.is_late and worker not in self._reaching:
                self._reaching[worker] = asyncio.create_task(self._hear_if_reached(worker))
        return [worker for worker in workers if worker.pulse.has_stopped]

    async def close(self) -> None:
        """End the attempts to connect."""
        for task in self._reaching.values():
            task.cancel()
        await asyncio.gather(*self._reaching.values(), return_exceptions=True)

    async def _hear_if_reached(self, worker: W) -> None:
        try:
            await self._reach(worker)
            worker.pulse.hear()
        finally:
            self._reaching.pop(worker, None)
