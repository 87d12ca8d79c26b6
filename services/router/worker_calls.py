"""Merges the worker calls of one attempt of a request into one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import grpc

from quire.protos import worker_pb2
from quire.services.router.worker import Worker
from quire.services.server.closed_channel import ChannelClosedError, closed_channel_errors
from quire.services.server.log import get_logger

QUEUE_SIZE = 16
"""Number of messages that may wait for a slow client before gRPC's flow control stops the worker."""
ABORT_SECONDS = 1.0

_log = get_logger("router")
Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


def connection_lost() -> grpc.aio.AioRpcError:
    """Return the error, with status UNAVAILABLE, of a call to a worker that was removed."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the worker was given up", "")


class Event(NamedTuple):
    """One event of a worker call: a message, an error, or the end of the stream (both None)."""

    worker: Worker
    message: Any = None
    error: grpc.aio.AioRpcError | None = None


class _RunningCall(NamedTuple):
    worker: Worker
    call: Any
    pump: asyncio.Task[None]


class WorkerCalls:
    """Runs the worker calls of one attempt; on exit, calls that have not ended are aborted."""

    def __init__(self, sequence_id: str, attempt: int, spawn: Spawn) -> None:
        self._sequence_id = sequence_id
        self._attempt = attempt
        self._spawn = spawn
        self._events: asyncio.Queue[Event] = asyncio.Queue(QUEUE_SIZE)
        self._running: dict[str, _RunningCall] = {}

    def start(self, worker: Worker, call: Any) -> None:
        """Begin to read the messages of a streaming call to a worker."""
        pump = asyncio.create_task(self._pump(worker, call))
        self._running[worker.worker_id] = _RunningCall(worker, call, pump)

    @property
    def num_running(self) -> int:
        """Number of worker calls whose end or error ``next`` has not returned yet."""
        return len(self._running)

    async def next(self) -> Event:
        """Wait for and return the next event of any worker call."""
        event = await self._events.get()
        if event.message is None:
            self._running.pop(event.worker.worker_id)
        return event

    async def __aenter__(self) -> WorkerCalls:
        return self

    async def __aexit__(self, *_: object) -> None:
        for each in self._running.values():
            each.call.cancel()
            each.pump.cancel()
            # Cancelling the stream has the same effect, but the worker does not confirm it.
            self._spawn(self._abort(each.worker))
        await asyncio.gather(*(each.pump for each in self._running.values()), return_exceptions=True)

    async def _pump(self, worker: Worker, call: Any) -> None:
        try:
            with closed_channel_errors():
                await worker.connection.check(call)
                async for message in call:
                    await self._events.put(Event(worker, message))
            await self._events.put(Event(worker))
        except ChannelClosedError:
            await self._events.put(Event(worker, error=connection_lost()))
        except grpc.aio.AioRpcError as error:
            await self._events.put(Event(worker, error=error))

    async def _abort(self, worker: Worker) -> None:
        request = worker_pb2.AbortRequest(sequence_ids=[self._sequence_id], attempt=self._attempt)
        try:
            with closed_channel_errors():
                await worker.stub.Abort(request, timeout=ABORT_SECONDS)
        except (grpc.aio.AioRpcError, ChannelClosedError) as error:
            # A worker that does not answer either notices the lost connection or is dead.
            _log.debug("abort_failed", worker=worker.worker_id, error=error)
