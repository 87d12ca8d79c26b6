"""Defines the common base of the interceptors of quire's gRPC servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio

from quire.rpc.errors import ServiceError

LIBRARY_METHODS = "/grpc."
"""Prefix of the methods of gRPC's own services: health and reflection."""


class OwnCalls(grpc.aio.ServerInterceptor, ABC):  # type: ignore[type-arg]
    """An interceptor that changes the handlers of all services except gRPC's own.

    gRPC's own services write their answers differently, need no key, and reveal nothing about requests.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler as ``change`` returns it; None if no service has the method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(LIBRARY_METHODS):
            return handler
        return self.change(handler, handler_call_details)

    @abstractmethod
    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler that serves the call instead of ``handler``."""


def handler_kind(handler: Any) -> str:
    """Return the name of the attribute that holds the handler's function, such as ``unary_stream``."""
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def refusal(error: ServiceError) -> Any:
    """Return a handler that fails with ``error`` without reading the request."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> NoReturn:
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
