"""Authenticates HTTP requests by their headers before anything else is done for them."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.tenants.tenant import Tenant

TENANT = web.RequestKey("tenant", Tenant)
"""Key under which handlers find the tenant of a request."""


def authorized(servicer: GenerationServicer, open_paths: Collection[str]) -> Middleware:
    """Return middleware that refuses requests without a known tenant, except on the open paths."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths:
            request[TENANT] = servicer.tenant_of(request.headers.items())
        return await handler(request)

    return handle
