"""How a server takes requests in: each within a time, and none that is no message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from quire.services.errors import DeadlineExceeded, InvalidArgument

REQUEST_SECONDS = 30.0
"""A request has to be here so long after its call began; of a stream, its first message."""

Deserialize = Callable[[bytes], Any]


class RequestIntake(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Reads requests in the servicer's stead.

    gRPC itself waits without end for a request whose caller set no deadline: calls that never send theirs
    would pile up. Bytes that are no message it answers with UNKNOWN, as if the server had a defect.

    On the wire a call with one request is a stream of one, so handlers of single requests become handlers of
    streams here, and read with a time limit. Typed errors are left to an interceptor further out.
    """

    def __init__(self, request_seconds: float = REQUEST_SECONDS) -> None:
        self._request_seconds = request_seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Replace the call's handler by one that reads the request itself."""
        handler = await continuation(handler_call_details)
        # The library's own services write their answers in ways of their own.
        is_library = handler_call_details.method.startswith("/grpc.")
        if handler is None or is_library or handler.request_deserializer is None:
            return handler
        requests = self._reader(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _streaming(handler, requests), response_serializer=handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            _single(handler, requests), response_serializer=handler.response_serializer
        )

    def _reader(self, deserialize: Deserialize) -> Callable[[AsyncIterator[bytes]], AsyncGenerator[Any]]:
        async def requests(encoded: AsyncIterator[bytes]) -> AsyncGenerator[Any]:
            try:
                async with asyncio.timeout(self._request_seconds):
                    first = await anext(encoded, None)
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the request did not arrive within {self._request_seconds:g} s of its call",
                    reason="REQUEST_TIMEOUT",
                ) from None
            if first is None:
                return
            yield _decode(deserialize, first)
            async for each in encoded:
                yield _decode(deserialize, each)

        return requests


def _single(handler: Any, requests: Callable[..., AsyncGenerator[Any]]) -> Callable[..., Any]:
    async def call(encoded: AsyncIterator[bytes], context: Any) -> Any:
        async with aclosing(requests(aiter(encoded))) as decoded:
            if handler.request_streaming:
                return await handler.stream_unary(decoded, context)
            return await handler.unary_unary(await _one(decoded), context)

    return call


def _streaming(handler: Any, requests: Callable[..., AsyncGenerator[Any]]) -> Callable[..., Any]:
    async def call(encoded: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async with aclosing(requests(aiter(encoded))) as decoded:
            if handler.request_streaming:
                responses = handler.stream_stream(decoded, context)
            else:
                responses = handler.unary_stream(await _one(decoded), context)
            async with aclosing(responses):
                async for response in responses:
                    yield response

    return call


async def _one(requests: AsyncGenerator[Any]) -> Any:
    request = await anext(requests, None)
    if request is None:
        raise InvalidArgument("request", "the call ended without one", reason="NO_REQUEST")
    return request


def _decode(deserialize: Deserialize, encoded: bytes) -> Any:
    try:
        return deserialize(encoded)
    except DecodeError:
        raise InvalidArgument(
            "request", "its bytes are no message of this call", reason="MALFORMED"
        ) from None
