"""Ends calls from outside their handlers, with an error that the callers receive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.rpc.errors import ServiceError

ENDED_READ_SECONDS = 1.0
"""Time within which the client of an ended call has to read the message that is being sent."""


@dataclass(slots=True)
class CallEnd:
    """How a call may end before its handler has finished.

    Attributes:
        drop: ends the call without a status.
        error: the error that ends the call; None: nothing has ended it.
        is_sending: whether a message is being sent. Until the client has read it, gRPC refuses a status.
    """

    drop: Callable[[], object]
    error: ServiceError | None = None
    is_sending: bool = False


_ends: dict[asyncio.Task[Any], CallEnd] = {}


def end_of(task: asyncio.Task[Any]) -> CallEnd:
    """Return the ``CallEnd`` of the call that a task handles; it exists until the task is done."""
    end = _ends.get(task)
    if end is None:
        end = _ends[task] = CallEnd(task.cancel)
        task.add_done_callback(lambda _: _ends.pop(task, None))
    return end


def end_call(task: asyncio.Task[Any], error: ServiceError) -> None:
    """End the call that a task handles; its caller gets the status of ``error``.

    If a message is being sent, the status follows it. A client that does not read the message within
    ``ENDED_READ_SECONDS`` gets no status: its call is dropped. If the call already has an error, that one is
    sent.
    """
    end = end_of(task)
    if end.error is not None or task.done():
        return
    end.error = error
    if not end.is_sending:
        task.cancel()
    else:
        timer = task.get_loop().call_later(ENDED_READ_SECONDS, end.drop)
        task.add_done_callback(lambda _: timer.cancel())


@contextmanager
def end_raised() -> Iterator[None]:
    """Raise the error with which ``end_call`` has ended the current call, in place of the cancellation."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        end = end_of(task)
        if end.error is None or end.is_sending:
            raise
        task.uncancel()
        raise end.error from None


async def end_calls(
    tasks: Sequence[asyncio.Task[Any]], error: ServiceError, seconds: float | None = None
) -> None:
    """End the calls that tasks handle, and wait until all have ended, at most for ``seconds`` if given."""
    for task in tasks:
        end_call(task, error)
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
