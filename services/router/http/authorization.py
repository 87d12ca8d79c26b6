"""Who asks: told by the headers, before anything is done for a request."""

from __future__ import annotations

from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from quire.services.router.servicer import GenerationServicer
from quire.services.router.tenants import Tenant

TENANT = web.RequestKey("tenant", Tenant)
"""Under this, handlers find whose a request is."""


def authorized(servicer: GenerationServicer, open_paths: Collection[str]) -> Middleware:
    """Refuse who proves no tenant; probes are for everyone."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths:
            request[TENANT] = servicer.tenant_of(request.headers.items())
        return await handler(request)

    return handle
