"""The errors of gRPC calls: of those that must fail, and as scripted calls raise them."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable

import grpc
import pytest


async def error_of(
    call: Awaitable[object] | AsyncIterable[object], code: grpc.StatusCode | None = None, text: str = ""
) -> grpc.aio.AioRpcError:
    """Return the error of a call or a stream, which has this status, if one is given, and this text."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if isinstance(call, AsyncIterable):
            async for _ in call:
                pass
        else:
            await call
    assert code in (None, caught.value.code())
    assert text in (caught.value.details() or "")
    return caught.value


def rpc_error(code: grpc.StatusCode, details: str = "scripted") -> grpc.aio.AioRpcError:
    """Return an error as gRPC raises it, without metadata."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "")
