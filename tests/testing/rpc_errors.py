"""The errors of gRPC calls: of those that must fail, and as scripted calls raise them."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc
import pytest


async def error_of(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    """Return the error of a call; fail if the call succeeds."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def rpc_error(code: grpc.StatusCode, details: str = "scripted") -> grpc.aio.AioRpcError:
    """Return an error as gRPC raises it, without metadata."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")
