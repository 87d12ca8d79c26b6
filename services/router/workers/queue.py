"""Queues requests while no worker can serve them.

Workers restart, and a request that arrives meanwhile would fail although it has time left. So it waits, and
the next available worker gets the waiting requests in their order of arrival.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import Gauge

from quire.rpc.errors import ServiceError


class WorkerQueue:
    """The requests that wait for a worker; admission limits their number.

    Args:
        can_serve: returns whether a decode worker takes requests now.
        max_wait_seconds: longest time that a request waits; 0: none waits.
        waiting: shows how many requests wait.
    """

    def __init__(
        self,
        can_serve: Callable[[], bool],
        *,
        max_wait_seconds: float,
        waiting: Gauge,
    ) -> None:
        self._can_serve = can_serve
        self._max_wait_seconds = max_wait_seconds
        self._waiting = waiting
        self._turns: list[tuple[float, int, asyncio.Future[None]]] = []
        """Sorted entries: arrival, a number that orders equal arrivals, and what wakes the request."""
        self._num_turns = 0

    def wake(self) -> None:
        """Let all waiting requests continue, the oldest first, if a worker accepts requests now."""
        if self._can_serve():
            for _, _, turn in self._turns:
                if not turn.done():
                    turn.set_result(None)

    def end(self, error: Callable[[], ServiceError]) -> None:
        """End all waits with an error."""
        for _, _, turn in self._turns:
            if not turn.done():
                turn.set_exception(error())

    async def turn(self, arrival: float, seconds: float) -> None:
        """Return when a worker accepts requests and no older request waits for one.

        Args:
            arrival: when the request arrived, a reading of the clock.
            seconds: time left until its deadline.

        Raises:
            TimeoutError: there was no worker within the longest wait, or until the deadline.
            ServiceError: the error of ``end``.
        """
        if self._can_serve() and not (self._turns and self._turns[0][0] < arrival):
            return
        self._num_turns += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (arrival, self._num_turns, turn)
        insort(self._turns, entry)
        try:
            async with shown(self._waiting), asyncio.timeout(min(self._max_wait_seconds, seconds)):
                await turn
        finally:
            self._turns.remove(entry)
            self.wake()


@asynccontextmanager
async def shown(waiting: Gauge) -> AsyncIterator[None]:
    """Count a request as waiting until the context ends."""
    waiting.inc()
    try:
        yield
    finally:
        waiting.dec()
