"""Refuses gRPC calls without a known API key before their request is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
import grpc.aio

from quire.services.router.tenants import Authenticator, Tenant
from quire.services.server.errors import ServiceError

CALLER: ContextVar[Tenant] = ContextVar("caller")
"""Tenant of the current call."""
OPEN_SERVICES = ("/grpc.",)
"""Method prefixes that need no key: health and reflection, which reveal nothing about any tenant."""


class RequireTenant(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Passes only calls of known tenants, and sets ``CALLER`` to the tenant for the servicer."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, or a handler that refuses the call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        try:
            CALLER.set(self._authenticator.authenticate(handler_call_details.invocation_metadata or ()))
        except ServiceError as error:
            return _refusal(error)
        return handler


def _refusal(error: ServiceError) -> Any:
    """Return a handler that fails with ``error`` without reading the request."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> NoReturn:
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
