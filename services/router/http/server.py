"""The HTTP server: its routes, who may call them, what errors look like, its start and its end."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry

from quire.services.errors import ServiceError, cannot_listen
from quire.services.grpc_server import HANDSHAKE_SECONDS, PUBLIC_MESSAGE_BYTES
from quire.services.log import get_logger
from quire.services.router.http.authorization import authorized
from quire.services.router.http.bodies import (
    BODY_SECONDS,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    first_request_id,
    json_response,
)
from quire.services.router.http.connection import SERVER, Connection, Count
from quire.services.router.http.errors import HttpError, from_service_error, http_error
from quire.services.router.http.metrics import HttpMetrics
from quire.services.router.http.openapi import openapi_document
from quire.services.router.http.routes import routes
from quire.services.router.http.times import HttpTimes
from quire.services.router.servicer import GenerationServicer

MARGIN_SECONDS = 5.0
"""Beyond the request's deadline, for its error to reach the client."""
GRACE_SHARE = 0.9
CLIENT_GONE = 499
"""The status that is counted for an answer which nobody waits for; nginx's."""

_log = get_logger("http")


class HttpServer:
    """A started server: its address and its end."""

    def __init__(self, listening: asyncio.Server, runner: web.AppRunner, host: str) -> None:
        self._listening = listening
        self._runner = runner
        self.port: int = listening.sockets[0].getsockname()[1]
        self.address = f"{host}:{self.port}"

    async def stop(self) -> None:
        """Refuse new connections, let running requests end within the grace, cancel the others."""
        self._listening.close()
        await self._runner.cleanup()


@asynccontextmanager
async def http_server(
    servicer: GenerationServicer,
    registry: CollectorRegistry,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    times: HttpTimes | None = None,
    request_timeout_seconds: float = 600.0,
    grace_seconds: float = 5.0,
) -> AsyncIterator[HttpServer]:
    """Serve the HTTP API until the context ends; port 0 takes a free one. Without ``tls`` it is plain.

    Raises:
        OSError: the address cannot be bound.
    """
    times = times or HttpTimes()
    count = HttpMetrics(registry).count
    table = routes(servicer, registry)
    open_paths = {route.path for route in table if route.is_open}
    app = web.Application(
        middlewares=[_errors(count), _deadline(request_timeout_seconds), authorized(servicer, open_paths)],
        client_max_size=PUBLIC_MESSAGE_BYTES,
    )
    app[BODY_SECONDS] = times.body_seconds
    for route in table:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)
    app.on_response_prepare.append(_name_answer)
    document = openapi_document(table)

    async def openapi(request: web.Request) -> web.Response:
        return web.json_response(document)

    app.router.add_get("/openapi.json", openapi)
    runner = web.AppRunner(
        app,
        # A client that is gone cancels its handler, and so frees its blocks.
        handler_cancellation=True,
        # The rest of the grace is for the gRPC calls that came while these requests ended.
        shutdown_timeout=GRACE_SHARE * grace_seconds,
    )
    await runner.setup()
    handler = runner.server
    assert handler is not None
    try:
        listening = await asyncio.get_running_loop().create_server(
            lambda: Connection(handler, times, count),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
        )
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, os.strerror(error.errno or 0)) from error
    server = HttpServer(listening, runner, host)
    try:
        yield server
    finally:
        await server.stop()


async def _name_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Name the request, and the project where aiohttp would tell its version and Python's."""
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
    response.headers["Server"] = SERVER


def _errors(count: Count) -> Middleware:
    """Turn errors into bodies that OpenAI's clients read, and count all answers."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = CLIENT_GONE
        request[REQUEST_ID] = first_request_id(request)
        try:
            response = await _answered(request, handler)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            count(resource.canonical if resource else "unknown", status)

    return handle


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ServiceError as error:
        return _error_response(from_service_error(error))
    except web.HTTPException as error:
        message = error.text or error.reason
        code = error.reason.lower().replace(" ", "_")
        response = _error_response(http_error(error.status, message, code=code))
        if isinstance(error, web.HTTPRequestTimeout):
            # The rest of its body may still come.
            response.force_close()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return web.Response(status=CLIENT_GONE)
    except Exception:
        _log.exception("request_failed", path=request.path, request_id=request[REQUEST_ID])
        return _error_response(
            http_error(500, "internal error; the server's log has the details", code="internal")
        )


def _error_response(error: HttpError) -> web.Response:
    return json_response(error.body, status=error.status, headers=error.headers)


def _deadline(seconds: float) -> Middleware:
    """End a request whose client sends or reads too slowly; the router keeps the deadline of all else."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            async with asyncio.timeout(seconds + MARGIN_SECONDS):
                return await handler(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return _error_response(http_error(504, "the client sent or read too slowly", code="timeout"))

    return handle
