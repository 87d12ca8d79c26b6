"""Queues requests while no worker can serve them.

Workers restart, and a request that arrives meanwhile would fail although it has time left. So it waits, and
the next available worker gets the waiting requests: those of one tenant in their order of arrival, and of the
tenants the one first that has been given the fewest prompt tokens in relation to its weight.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from operator import itemgetter
from typing import NamedTuple

from prometheus_client import Gauge

from quire.fairness.shares import ServedTokens
from quire.rpc.errors import ServiceError


class Work(NamedTuple):
    """What a request asks of the workers, and for whom."""

    tenant: str = ""
    num_tokens: int = 1
    weight: int = 1
    descriptor: bytes = b""
    """Cache descriptor of the workers that began its answer; empty: none did, and any worker may serve it."""


class _Entry(NamedTuple):
    """A waiting request."""

    arrival: float
    number: int
    """Orders equal arrivals."""
    turn: asyncio.Future[None]
    """Wakes the request."""
    work: Work


ONE_TOKEN = Work()


def in_fair_order(entries: list[_Entry]) -> list[_Entry]:
    """Return entries, which are in the order of arrival, so that tenants take turns by their weights."""
    served = ServedTokens[str](credit=inf)
    places: list[tuple[float, _Entry]] = []
    for entry in entries:
        places.append((served.level(entry.work.tenant), entry))
        served.serve(entry.work.tenant, entry.work.num_tokens, entry.work.weight)
    return [entry for _, entry in sorted(places, key=itemgetter(0))]


class WorkerQueue:
    """The requests that wait for a worker; admission limits their number.

    Args:
        can_serve: returns whether a decode worker takes requests now that begin, or that workers with a cache
            descriptor began.
        max_wait_seconds: longest time that a request waits; 0: none waits.
        waiting: shows how many requests wait.
    """

    def __init__(
        self,
        can_serve: Callable[[bytes], bool],
        *,
        max_wait_seconds: float,
        waiting: Gauge,
    ) -> None:
        self._can_serve = can_serve
        self._max_wait_seconds = max_wait_seconds
        self._waiting = waiting
        self._turns: list[_Entry] = []
        """The waiting requests in the order of arrival."""
        self._num_turns = 0

    def wake(self) -> None:
        """Let the waiting requests continue, in a fair order, for which a worker accepts requests now."""
        waiting = [entry for entry in self._turns if not entry.turn.done()]
        served = {each for each in {entry.work.descriptor for entry in waiting} if self._can_serve(each)}
        for entry in in_fair_order([entry for entry in waiting if entry.work.descriptor in served]):
            entry.turn.set_result(None)

    def end(self, error: Callable[[], ServiceError]) -> None:
        """End all waits with an error."""
        for entry in self._turns:
            if not entry.turn.done():
                entry.turn.set_exception(error())

    async def turn(self, arrival: float, seconds: float, work: Work = ONE_TOKEN) -> None:
        """Return when a worker accepts requests and no older request waits for one.

        Args:
            arrival: when the request arrived, a reading of the clock, plus its patience.
            seconds: time left until its deadline.

        Raises:
            TimeoutError: there was no worker within the longest wait, or until the deadline.
            ServiceError: the error of ``end``.
        """
        if self._can_serve(work.descriptor) and not any(
            each.arrival < arrival and self._can_serve(each.work.descriptor) for each in self._turns
        ):
            return
        self._num_turns += 1
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Entry(arrival, self._num_turns, turn, work)
        insort(self._turns, entry, key=itemgetter(0, 1))
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
