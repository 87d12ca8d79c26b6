"""Ends calls whose client stops reading, and calls that take longer than the limit for any request."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from types import CoroutineType
from typing import Any
from weakref import WeakKeyDictionary, ref

import grpc

from quire.rpc.ended_calls import CallEnd, end_of
from quire.rpc.interceptors import OwnCalls, handler_kind

READ_SECONDS = 30.0
"""Time within which a client has to read each message."""
READ_BYTES_PER_SECOND = 1 << 20
"""Slowest allowed rate of reading: a message gets its size divided by this rate as additional time."""
CALL_MARGIN_SECONDS = 5.0
"""Time after a request's deadline for its error to reach the client."""

_log = logging.getLogger("quire.grpc")
_parents: WeakKeyDictionary[asyncio.Task[Any], ref[asyncio.Task[Any]]] = WeakKeyDictionary()
"""For each call's task, the gRPC task that started it and holds the call until its client disconnects."""


class CallLimits(OwnCalls):
    """Drops a call if its client does not read in time, and writes the messages of streams.

    While a message waits for its reader, gRPC cannot send a status. The handler is therefore cancelled first,
    which frees its resources. Then the call is cancelled, which resets its stream and frees the message.
    gRPC's server keeps the newest call until the next one arrives, so on an idle server a dropped call is
    reset only then.

    Streaming handlers must be async generators.

    Args:
        read_seconds: time within which a client has to read a message of a stream, a unary answer, or a
            status.
        call_seconds: maximum time of a call, from its beginning until its answer has been sent; None: no
            limit.
    """

    def __init__(self, read_seconds: float = READ_SECONDS, call_seconds: float | None = None) -> None:
        self._read_seconds = read_seconds
        self._call_seconds = call_seconds

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that applies the limits to the call's own handler."""
        kind = handler_kind(handler)
        wrap = self._streaming if handler.response_streaming else self._single
        return handler._replace(**{kind: wrap(details.method, getattr(handler, kind))})

    def _single(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            drop = self._begin(method).drop
            response = None
            try:
                response = await inner(request, context)
                return response
            finally:
                # gRPC sends the response or the status after this function has returned, in the same task.
                _in_task(self._seconds_for(response), drop)

        return call

    def _streaming(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isasyncgenfunction(inner):
            raise TypeError(f"{method}: a streaming handler must be an async generator")

        async def call(request: Any, context: Any) -> None:
            end = self._begin(method)
            timer = _ReadTimer(end.drop)
            try:
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        await self._send(response, context, end, timer)
            finally:
                timer.close()
                # The status can be sent only after the client has read the last message.
                _in_task(self._read_seconds, end.drop)

        return call

    async def _send(self, response: Any, context: Any, end: CallEnd, timer: _ReadTimer) -> None:
        """Send one message, and then raise the error that ended the call meanwhile, if there is one."""
        timer.begin(self._seconds_for(response))
        end.is_sending = True
        try:
            await context.write(response)
        finally:
            timer.end()
        end.is_sending = False
        if end.error is not None:
            raise end.error

    def _begin(self, method: str) -> CallEnd:
        """Start the timer of a call, and let ``CallEnd.drop`` end it."""
        task = asyncio.current_task()
        assert task is not None

        def drop() -> None:
            _log.info(
                "call_dropped", extra={"fields": {"method": method, "problem": "its client read too slowly"}}
            )
            _cancel(task)

        end = end_of(task)
        end.drop = drop
        if self._call_seconds is not None:
            _in_task(self._call_seconds, drop)
        return end

    def _seconds_for(self, response: Any) -> float:
        num_bytes: int = 0 if response is None else response.ByteSize()
        return self._read_seconds + num_bytes / READ_BYTES_PER_SECOND


class _ReadTimer:
    """Drops a call whose client takes too long to read one of its messages.

    Almost every message is read immediately. To save time, the loop's timer is therefore not set and
    cancelled again for each message. When it expires, it checks whether its message, or a later one, is still
    waiting.
    """

    def __init__(self, drop: Callable[[], object]) -> None:
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._until: float | None = None
        """Time by which the message that is being sent has to be read; None if there is none."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> None:
        """Begin to time the reading of a message."""
        self._until = until = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > until:
            self.close()
        if self._timer is None:
            self._timer = self._loop.call_at(until, self._look)

    def end(self) -> None:
        """Stop timing, because the message was read or could not be sent."""
        self._until = None

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._until is None:
            return
        if self._until <= self._loop.time():
            self._drop()
        else:
            self._timer = self._loop.call_at(self._until, self._look)


def _in_task(seconds: float, drop: Callable[[], object]) -> None:
    """Call ``drop`` after some seconds unless the current task ends first."""
    task = asyncio.current_task()
    assert task is not None
    timer = asyncio.get_running_loop().call_later(seconds, drop)
    task.add_done_callback(lambda _: timer.cancel())


def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a call's task, then the call: gRPC would otherwise keep it until its client disconnects."""
    parent = found() if (found := _parents.get(task)) else None
    if parent is not None:
        task.add_done_callback(lambda _: parent.cancel())
    task.cancel()


def remember_parents() -> None:
    """From now on, record the parent of each task that gRPC starts on the running loop.

    gRPC has no function with which a server can cancel a call. However, the parent of a call's task waits for
    the client to disconnect, and is the last task that references the call. Cancelling the parent ends the
    call.
    """
    loop = asyncio.get_running_loop()
    make: Any = loop.get_task_factory() or asyncio.Task
    if isinstance(make, _Remembering):
        return
    remembering: Any = _Remembering(make)
    loop.set_task_factory(remembering)


class _Remembering:
    """A task factory that records the parents of gRPC's tasks in ``_parents``."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> Any:
        make = self._make
        is_default = make is asyncio.Task
        task = make(coroutine, loop=loop, **options) if is_default else make(loop, coroutine, **options)
        # gRPC's coroutines are written in Cython; all other coroutines have Python's own type.
        if not isinstance(coroutine, CoroutineType) and (parent := asyncio.current_task(loop)):
            _parents[task] = ref(parent)
        return task
