"""The errors of gRPC calls that must fail."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc
import pytest


async def error_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """Return the error of a call; fail if the call succeeds."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value
