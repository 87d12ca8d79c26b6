"""Reads a server's requests within a time limit, and refuses bytes that are not a valid message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quire.rpc.errors import DeadlineExceeded, InvalidArgument
from quire.rpc.interceptors import OwnCalls
from quire.rpc.message_parts import SMALL_MESSAGE_BYTES, check_parts

REQUEST_SECONDS = 30.0
"""Time from the start of a call within which its request, or the first message of a stream, must arrive."""

Deserialize = Callable[[bytes], Any]
AddBytes = Callable[[int], None]
"""Counts further bytes of a request; raises an error if there is no room for them."""
Memory = Callable[[], AbstractContextManager[AddBytes]]
"""Begins to count the bytes of one request, until the context ends."""


@contextmanager
def unbounded() -> Iterator[AddBytes]:
    """Accept any number of bytes."""
    yield lambda num_bytes: None


@dataclass(eq=False)
class RequestIntake(OwnCalls):
    """Reads and decodes requests instead of gRPC.

    gRPC itself waits indefinitely for a request whose caller set no deadline, so calls that never send their
    request would pile up. It answers bytes that are not a message with UNKNOWN, as if the server had a bug.

    On the wire, a call with a single request is a stream of one message. Handlers of single requests are
    therefore replaced by handlers of streams, which read with a time limit. An outer interceptor turns the
    errors into statuses.

    Args:
        memory: counts the bytes of each call's messages until the call ends.
        checks_parts: whether to refuse messages that would take long to parse; needed where untrusted clients
            can connect.
    """

    request_seconds: float = REQUEST_SECONDS
    _: KW_ONLY
    memory: Memory = unbounded
    checks_parts: bool = False

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that reads the request itself and then calls the call's own handler."""
        if handler.request_deserializer is None:
            return handler
        requests = self._reader(handler.request_deserializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _streaming(handler, requests), response_serializer=handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            _single(handler, requests), response_serializer=handler.response_serializer
        )

    def _reader(self, deserialize: Deserialize) -> Callable[[AsyncGenerator[bytes]], AsyncGenerator[Any]]:
        async def requests(encoded: AsyncGenerator[bytes]) -> AsyncGenerator[Any]:
            # Unless the generator is closed, it keeps the call in memory until the next full garbage
            # collection.
            async with aclosing(encoded):
                try:
                    async with asyncio.timeout(self.request_seconds):
                        first = await anext(encoded, None)
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"the request did not arrive within {self.request_seconds:g} s of its call",
                        reason="REQUEST_TIMEOUT",
                    ) from None
                if first is None:
                    return
                with self.memory() as add_bytes:
                    add_bytes(len(first))
                    yield await self._decode(deserialize, first)
                    async for each in encoded:
                        add_bytes(len(each))
                        yield await self._decode(deserialize, each)

        return requests

    async def _decode(self, deserialize: Deserialize, encoded: bytes) -> Any:
        if self.checks_parts and len(encoded) > SMALL_MESSAGE_BYTES:
            message_type: Any = getattr(deserialize, "__self__", None)
            await asyncio.to_thread(check_parts, encoded, message_type.DESCRIPTOR)
        try:
            return deserialize(encoded)
        except DecodeError:
            raise InvalidArgument(
                "request", "its bytes are no message of this call", reason="MALFORMED"
            ) from None


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
