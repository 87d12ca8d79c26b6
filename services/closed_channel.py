"""One error for calls whose channel somebody closes, which gRPC tells in two ways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio


class ChannelClosedError(Exception):
    """The call's channel was closed, before it or meanwhile."""


@contextmanager
def closed_channel_errors() -> Iterator[None]:
    """Raise ``ChannelClosedError`` for a call on a closed channel.

    A call that begins there raises ``UsageError``; one that is under way raises ``CancelledError``, although
    nobody cancelled the task that waits for it.
    """
    try:
        yield
    except grpc.aio.UsageError as error:
        raise ChannelClosedError(str(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ChannelClosedError("the channel was closed during the call") from error
