"""Counts the clients' calls that a router is serving, and refuses new calls while it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.services.server.errors import RETRY_AFTER_SECONDS, Unavailable


class OpenCalls:
    """Counts the running calls of the gRPC and the HTTP API; one call may have many generations."""

    def __init__(self) -> None:
        self._number = 0
        self._is_stopping = False
        self._ended = asyncio.Event()

    @property
    def number(self) -> int:
        """Number of calls that are running."""
        return self._number

    def check(self) -> None:
        """Return if new calls are accepted.

        Raises:
            Unavailable: the router is stopping.
        """
        if self._is_stopping:
            raise Unavailable(
                "this router is stopping; send the request to another one, or try again",
                reason="DRAINING",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Count a call as running until the context ends.

        Raises:
            Unavailable: the router is stopping.
        """
        self.check()
        self._number += 1
        try:
            yield
        finally:
            self._number -= 1
            self._ended.set()

    async def finish(self) -> None:
        """Refuse new calls from now on, and return when the running calls have ended."""
        self._is_stopping = True
        while self._number:
            self._ended.clear()
            await self._ended.wait()
