"""Tells routers at once when the engine hangs or makes progress again, and when the worker drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from quire.protos import worker_pb2


class EngineReports:
    """What routers have to know at once about this worker, for any number of them."""

    def __init__(self) -> None:
        self._is_stalled = False
        self._is_draining = False
        self._is_closed = False
        self._has_changed = asyncio.Event()
        """Replaced by a new one at each change, so that every reader is woken once for each."""

    def tell_stalled(self, is_stalled: bool) -> None:
        """Report that the engine is stalled, or that it makes progress again."""
        self._is_stalled = is_stalled
        self._wake()

    def tell_draining(self, is_draining: bool) -> None:
        """Report that the worker drains, or no longer does."""
        self._is_draining = is_draining
        self._wake()

    def close(self) -> None:
        """End all calls, and refuse new ones: an open call would hold up the end of the process."""
        self._is_closed = True
        self._wake()

    async def follow(self) -> AsyncGenerator[worker_pb2.WatchEngineResponse, None]:
        """Yield the present state, and then each new one, until the worker ends."""
        told = None
        while not self._is_closed:
            now = worker_pb2.WatchEngineResponse(is_stalled=self._is_stalled, is_draining=self._is_draining)
            if told != now:
                told = now
                yield now
            elif not self._is_closed:
                await self._has_changed.wait()

    def _wake(self) -> None:
        self._has_changed.set()
        self._has_changed = asyncio.Event()
