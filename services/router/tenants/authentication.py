"""Refuses gRPC calls without a known API key before their request is read."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import grpc

from quire.rpc.errors import ServiceError
from quire.rpc.interceptors import OwnCalls, refusal
from quire.services.router.tenants.api_keys import Authenticator
from quire.services.router.tenants.tenant import Tenant

CALLER: ContextVar[Tenant] = ContextVar("caller")
"""Tenant of the current call."""


class RequireTenant(OwnCalls):
    """Passes only calls of known tenants, and sets ``CALLER`` to the tenant for the servicer."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return the call's handler, or a handler that refuses the call."""
        try:
            CALLER.set(self._authenticator.authenticate(details.invocation_metadata or ()))
        except ServiceError as error:
            return refusal(error)
        return handler
