"""Orders the formats that wait for the compiler: the tenant that has used it least recently comes first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

HALF_LIFE_SECONDS = 30.0
"""Half-life of the seconds that a tenant has used."""
MIN_SECONDS = 0.001
"""A tenant that has used fewer seconds is forgotten."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Job:
    client: str
    work: Callable[[], Any]
    result: asyncio.Future[Any]


class FormatQueue:
    """Runs one job at a time in a thread: the next one is from the tenant with the fewest recent seconds.

    Jobs of one tenant run in the order of arrival. If a caller is cancelled, its job is removed from the
    queue. A job that is already running continues to its end, and its tenant is charged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # A separate thread, since formats that take seconds would delay other work.
        self._thread = ThreadPoolExecutor(1, "formats")
        self._clock = clock
        self._waiting: list[_Job] = []
        self._is_busy = False
        self._seconds: dict[str, float] = {}
        self._as_of = clock()
        """When the seconds of all tenants were last reduced."""

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Run ``work`` when it is the client's turn; return its result."""
        job = _Job(client, work, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._start_next()
        try:
            result: T = await job.result
            return result
        finally:
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Start no more jobs."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        self._is_busy = True
        job = min(self._waiting, key=lambda each: self._seconds.get(each.client, 0.0))
        self._waiting.remove(job)
        running = asyncio.get_running_loop().run_in_executor(self._thread, job.work)
        running.add_done_callback(partial(self._end, job, self._clock()))

    def _end(self, job: _Job, begin: float, running: asyncio.Future[Any]) -> None:
        self._is_busy = False
        self._charge(job.client, begin)
        if running.cancelled():
            job.result.cancel()
        elif job.result.done():
            running.exception()  # the caller was cancelled; asyncio would log an error that is not retrieved
        elif (error := running.exception()) is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(running.result())
        self._start_next()

    def _charge(self, client: str, begin: float) -> None:
        now = self._clock()
        rest = 0.5 ** ((now - self._as_of) / HALF_LIFE_SECONDS)
        self._as_of = now
        left = {each: seconds * rest for each, seconds in self._seconds.items()}
        self._seconds = {each: seconds for each, seconds in left.items() if seconds >= MIN_SECONDS}
        self._seconds[client] = self._seconds.get(client, 0.0) + now - begin
