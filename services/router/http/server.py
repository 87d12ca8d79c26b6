"""Runs the HTTP server: its routes, authentication, error responses, start and stop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import cache

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter

from quire.rpc.call_limits import CALL_MARGIN_SECONDS
from quire.rpc.ended_calls import end_raised
from quire.rpc.errors import ServiceError, cannot_listen, shortened
from quire.rpc.server import HANDSHAKE_SECONDS
from quire.services.router.config import HttpTimes
from quire.services.router.grpc.open_calls import OpenCalls
from quire.services.router.grpc.request_memory import RequestMemory
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.openapi import openapi_document
from quire.services.router.http.page.files import PAGE_FILES, page_file
from quire.services.router.http.routes import Route, routes
from quire.services.router.http.shared.bodies import (
    ADD_BYTES,
    BODY_ACCOUNT,
    MAX_TOKENS,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    TENANT,
    TIMES,
    first_request_id,
    json_response,
)
from quire.services.router.http.shared.connection import SERVER, Count, HttpConnection
from quire.services.router.http.shared.errors import (
    ANTHROPIC_PATH,
    HttpError,
    from_service_error,
    http_error,
    in_anthropic_form,
)
from quire.services.router.http.shared.resumable import ANSWERS, ResumableAnswers
from quire.services.server.log import EventLogger

CANCEL_SECONDS = 0.1
"""Time for handlers to end after they were cancelled at the server's stop."""
BACKLOG = 1024
"""Connections that may wait to be accepted; clients try to open more again after 1, 3 and 7 s."""
CLIENT_GONE = 499
"""Status that is counted if the client left before the answer; nginx uses the same."""

_log = EventLogger("http")


class HttpMetrics:
    """Counts the requests over HTTP, by route and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "quire_http_requests_total",
            "Requests over HTTP that were answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )

    def count(self, route: str, status: int) -> None:
        """Count one answered request."""
        self._requests.labels(route, str(status)).inc()


class HttpServer:
    """A started HTTP server, with its address and its stop."""

    def __init__(self, listening: asyncio.Server, runner: web.AppRunner, host: str) -> None:
        self._listening = listening
        self._runner = runner
        self.port: int = listening.sockets[0].getsockname()[1]
        self.address = f"{host}:{self.port}"

    async def finish(self) -> None:
        """Refuse new connections, and return when all answers have been sent."""
        self._listening.close()
        assert self._runner.server is not None
        self._runner.server.pre_shutdown()
        await self._runner.server.shutdown()

    async def stop(self) -> None:
        """Refuse new connections and cancel the running requests."""
        self._listening.close()
        await self._runner.cleanup()


@asynccontextmanager
async def http_server(
    servicer: GenerationServicer,
    registry: CollectorRegistry,
    memory: RequestMemory,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    times: HttpTimes | None = None,
    request_timeout_seconds: float = 600.0,
    shares_port: bool = False,
) -> AsyncIterator[HttpServer]:
    """Serve the HTTP API until the context ends.

    Args:
        memory: bounds the bytes of the requests under way.
        port: 0 takes a free port, found in ``HttpServer.port``.
        tls: None: connections are plain.
        request_timeout_seconds: time limit of a request, as in the router.
        shares_port: whether other processes may listen on the same port, and get a part of the connections.

    Raises:
        OSError: the address cannot be bound.
    """
    times = times or HttpTimes()
    count = HttpMetrics(registry).count
    app = _application(routes(servicer, registry), servicer, memory, count, request_timeout_seconds)
    app[TIMES] = times
    # When a client leaves, its handler is cancelled, which frees the request's blocks.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CANCEL_SECONDS)
    await runner.setup()
    handler = runner.server
    assert handler is not None
    try:
        listening = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(handler, times, count),
            host.strip("[]"),
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
            backlog=BACKLOG,
            reuse_port=shares_port or None,
        )
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen(host, port, error) from error
    server = HttpServer(listening, runner, host)
    try:
        yield server
    finally:
        await server.stop()


def _application(
    table: Sequence[Route],
    servicer: GenerationServicer,
    memory: RequestMemory,
    count: Count,
    request_timeout_seconds: float,
) -> web.Application:
    """Return the application with all routes, and with the route that describes them."""
    open_paths = {route.path for route in table if route.is_open} | PAGE_FILES.keys()
    app = web.Application(
        middlewares=[
            _errors(count),
            _deadline(request_timeout_seconds),
            _authorized(servicer, open_paths),
            _counted(servicer.calls),
            _bounded(memory),
        ],
    )
    for route in table:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)
    for path in PAGE_FILES:
        app.router.add_get(path, page_file)
    app[ANSWERS] = ResumableAnswers()
    app.on_cleanup.append(app[ANSWERS].close)
    app.on_response_prepare.append(_name_answer)
    document = cache(lambda: json.dumps(openapi_document(table)))

    async def openapi(request: web.Request) -> web.Response:
        # Most routers are never asked for it, and the event loop could not wait while pydantic writes it.
        return web.json_response(text=await asyncio.to_thread(document))

    app.router.add_get("/openapi.json", openapi)
    return app


async def _name_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of all answers; that of the server does not reveal aiohttp's and Python's versions.

    If a part of the body has not arrived yet, the connection ends with this answer.
    """
    # aiohttp itself refuses an Expect header that it does not know, before any middleware runs.
    response.headers[REQUEST_ID_HEADER] = request.get(REQUEST_ID) or first_request_id(request)
    response.headers["Server"] = SERVER
    if _is_anthropic(request):
        # Anthropic's clients read this one.
        response.headers["Request-Id"] = response.headers[REQUEST_ID_HEADER]
    if MAX_TOKENS in request:
        response.headers["X-Quire-Max-Tokens"] = str(request[MAX_TOKENS])
    if not request.content.is_eof():
        # Reading the rest of the body would cost more than a new connection.
        response.headers["Connection"] = "close"
        response.force_close()
        assert isinstance(request.protocol, HttpConnection)
        request.protocol.drop_rest()


def _errors(count: Count) -> Middleware:
    """Return middleware that turns errors into bodies that OpenAI's clients read, and counts all answers."""

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
        _check_framing(request)
        return await handler(request)
    except ServiceError as error:
        return _error_response(request, from_service_error(error))
    except web.HTTPException as error:
        code = error.reason.lower().replace(" ", "_")
        response = _error_response(request, http_error(error.status, _message(request, error), code=code))
        if isinstance(error, web.HTTPBadRequest):
            # A proxy may disagree about where this request ends.
            response.force_close()
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return web.Response(status=CLIENT_GONE)
    except Exception:
        _log.exception("request_failed", path=request.path, request_id=request[REQUEST_ID])
        failure = http_error(500, "internal error; the server's log has the details", code="internal")
        return _error_response(request, failure)


def _check_framing(request: web.Request) -> None:
    """Refuse transfer codings that aiohttp does not decode, and any in HTTP/1.0, which has none.

    Raises:
        HTTPBadRequest: the body is sent in another way than as it is or in chunks.
    """
    coding = request.headers.get("Transfer-Encoding")
    if coding is not None and (coding.strip().lower() != "chunked" or request.version < HttpVersion11):
        raise web.HTTPBadRequest(text="Transfer-Encoding must be 'chunked' and nothing else, in HTTP/1.1")


def _message(request: web.Request, error: web.HTTPException) -> str:
    """Return the message for an error of aiohttp's."""
    path = shortened(request.path)
    if isinstance(error, web.HTTPNotFound):
        return f"there is no route {shortened(request.method)} {path}; GET /openapi.json lists the routes"
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{path} takes {', '.join(sorted(error.allowed_methods))}, not {shortened(request.method)}"
    return error.text or error.reason


def _is_anthropic(request: web.Request) -> bool:
    return request.path == ANTHROPIC_PATH or request.path.startswith(f"{ANTHROPIC_PATH}/")


def _error_response(request: web.Request, error: HttpError) -> web.Response:
    body = in_anthropic_form(error, request[REQUEST_ID]) if _is_anthropic(request) else error.body
    return json_response(body, status=error.status, headers=error.headers)


def _authorized(servicer: GenerationServicer, open_paths: Collection[str]) -> Middleware:
    """Return middleware that refuses requests without a known tenant, except on the open paths."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in open_paths:
            request[TENANT] = servicer.tenant_of(request.headers.items())
        return await handler(request)

    return handle


def _counted(calls: OpenCalls) -> Middleware:
    """Return middleware that counts POST requests and streams as open calls; a stopping router refuses them.

    A stopping router waits for its open calls.
    """

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST" and "stream" not in request.query:
            return await handler(request)
        async with calls.entered():
            with end_raised():
                return await handler(request)

    return handle


def _bounded(memory: RequestMemory) -> Middleware:
    """Return middleware that lets the bytes of each request count until its answer has been sent."""

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, HttpConnection)
        with ExitStack() as account:
            add_bytes = account.enter_context(memory.request())

            def add(num_bytes: int) -> None:
                connection.check_chunks(request)
                add_bytes(num_bytes)

            request[ADD_BYTES], request[BODY_ACCOUNT] = add, account
            return await handler(request)

    return handle


def _deadline(seconds: float) -> Middleware:
    """Return middleware that ends a request whose client sends or reads too slowly.

    The router itself enforces the deadline of everything else.
    """

    @web.middleware
    async def handle(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            async with asyncio.timeout(seconds + CALL_MARGIN_SECONDS):
                return await handler(request)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            error = http_error(504, "the client sent or read too slowly", code="timeout")
            return _error_response(request, error)

    return handle
