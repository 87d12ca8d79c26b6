"""Raises one error for calls on a channel that was closed, which gRPC reports in two different ways."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc.aio


class ChannelClosedError(Exception):
    """The channel was closed before the call or during it."""


@contextmanager
def closed_channel_errors() -> Iterator[None]:
    """Raise ``ChannelClosedError`` for a call on a closed channel.

    If the channel is closed before a call begins, gRPC raises ``UsageError``. If it is closed during the
    call, gRPC raises ``CancelledError``, although the task that waits for the call was not cancelled.
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
