"""Refuses calls without a known key before their request is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from quire.services.errors import ServiceError
from quire.services.router.tenants import Authenticator

OPEN_SERVICES = ("/grpc.",)
"""Health and reflection tell nothing of anybody: probes and tools need no key."""


class RequireTenant(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets calls of known tenants pass; servicers ask the same authenticator whose they are."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the call's handler, or one that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(OPEN_SERVICES):
            return handler
        try:
            self._authenticator.authenticate(handler_call_details.invocation_metadata or ())
        except ServiceError as error:
            return _refusal(error)
        return handler


def _refusal(error: ServiceError) -> Any:
    """Return a handler that reads nothing and fails."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> NoReturn:
        raise error

    return grpc.stream_unary_rpc_method_handler(refuse)
