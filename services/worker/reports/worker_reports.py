"""Reports the state of this worker, and the load of other routers, to each router as soon as they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from quire.protos import worker_pb2
from quire.services.worker.reports.request_loads import RequestLoads
from quire.services.worker.state import WorkerState

BEAT_SECONDS = 0.4
"""Longest interval between two reports, since routers measure the silence of a worker."""
LOAD_SECONDS = 0.1
"""Shortest interval between two reports of the load, which changes with each request."""


class WorkerReports:
    """Reports this worker's state and load to any number of routers.

    Attributes:
        loads: the loads of the running requests.
    """

    def __init__(self, state: WorkerState) -> None:
        self.loads = RequestLoads(self._wake_later)
        self._state = state
        self._is_closed = False
        self._waking: asyncio.TimerHandle | None = None
        self._has_changed = asyncio.Event()
        """Each change replaces it by a new event, so every reader is woken once per change."""
        state.call_on_change(self._wake)

    def close(self) -> None:
        """End all calls, and refuse new ones, since an open call would delay the end of the process."""
        self._is_closed = True
        self._wake()

    async def follow(self, router_id: str) -> AsyncGenerator[worker_pb2.WatchWorkerResponse, None]:
        """Yield the present state, and then each new one and every ``BEAT_SECONDS``, until the worker ends.

        Args:
            router_id: the router that asks; the load does not include its own requests.
        """
        reported, reported_at = None, 0.0
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            # Get the event before making the report, so that any later change wakes this reader.
            has_changed = self._has_changed
            report = worker_pb2.WatchWorkerResponse(
                role=self._state.role,
                is_draining=self._state.is_draining,
                is_stalled=self._state.is_stalled,
                load_of_others=self.loads.of_others(router_id),
                adapters=adapters_to_proto(self._state),
            )
            if report != reported or loop.time() >= reported_at + BEAT_SECONDS:
                reported, reported_at = report, loop.time()
                yield report
            if not self._is_closed:
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(reported_at + BEAT_SECONDS):
                        await has_changed.wait()

    def _wake_later(self) -> None:
        """Wake the readers within ``LOAD_SECONDS``, once for all changes until then."""
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_later(LOAD_SECONDS, self._wake)

    def _wake(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        self._has_changed.set()
        self._has_changed = asyncio.Event()


def adapters_to_proto(state: WorkerState) -> list[worker_pb2.Adapter]:
    """Return the loaded adapters, as routers learn of them."""
    return [worker_pb2.Adapter(name=name, digest=each.digest) for name, each in state.adapters.items()]
