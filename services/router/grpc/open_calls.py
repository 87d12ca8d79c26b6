"""Counts the clients' calls that a router is serving, and refuses new calls while it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from quire.rpc.ended_calls import end_calls
from quire.rpc.errors import DRAINING, RETRY_AFTER_SECONDS, Unavailable

END_SECONDS = 1.0
"""Time for calls that are ended to notify their clients."""


class OpenCalls:
    """Counts the running calls of the gRPC and the HTTP API; one call may have many generations."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_stopping = False
        self._ended = asyncio.Event()

    @property
    def number(self) -> int:
        """Number of calls that are running."""
        return len(self._tasks)

    def check(self) -> None:
        """Return if new calls are accepted.

        Raises:
            Unavailable: the router is stopping.
        """
        if self.is_stopping:
            raise router_stops("this router is stopping")

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Count a call as running until the context ends.

        Raises:
            Unavailable: the router is stopping.
        """
        self.check()
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.remove(task)
            self._ended.set()

    async def finish(self) -> None:
        """Refuse new calls from now on, and return when the running calls have ended.

        If this is cancelled, because the grace period is over, end those that still run with UNAVAILABLE.
        """
        self.is_stopping = True
        try:
            while self._tasks:
                self._ended.clear()
                await self._ended.wait()
        finally:
            error = router_stops("this router stops, and its time to drain is over")
            await end_calls(list(self._tasks), error, END_SECONDS)


def router_stops(problem: str) -> Unavailable:
    """Return the error of a call that a stopping router does not serve."""
    return Unavailable(
        f"{problem}; send the request to another router, or try again",
        reason=DRAINING,
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )
