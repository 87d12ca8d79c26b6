"""What every gRPC server of ours has: health, reflection, limits, typed errors, metrics, a graceful stop."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, Counter

from quire.kvtransfer.channels import MAX_MESSAGE_BYTES
from quire.services.errors import Internal, ServiceError, cannot_listen, to_status
from quire.services.log import get_logger
from quire.services.request_intake import RequestIntake

PUBLIC_MESSAGE_BYTES = 16 << 20
MAX_CONCURRENT_STREAMS = 4096
HANDSHAKE_SECONDS = 20.0

_log = get_logger("grpc")
E = TypeVar("E", bound=Exception)
ServerOptions = list[tuple[str, int]]
Drain = Callable[[], Awaitable[None]]


class Service(NamedTuple):
    """One servicer: the generated ``add_XServicer_to_server``, the servicer, and ``package.X``."""

    add_to_server: Callable[..., Any]
    servicer: object
    full_name: str


def server_options(max_message_bytes: int) -> ServerOptions:
    """Return the options of a server."""
    return [
        # The default of 4 MiB refuses a long prompt, or a batch of KV blocks.
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # One broken client could otherwise open streams until the process has no memory.
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # A connection that never says what it wants would be kept for two minutes.
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        # By default a client that pings during a long prefill is sent away with GOAWAY too_many_pings.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine vanished sends no FIN: without pings its requests would hold blocks for ever.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # With SO_REUSEPORT a second server on the same port starts happily and takes half of the calls.
        ("grpc.so_reuseport", 0),
    ]


class GrpcServer:
    """A started server: its address, its health, its end."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: Any,
        service_names: Sequence[str],
        host: str,
        port: int,
        grace_seconds: float,
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._service_names = service_names
        self._grace_seconds = grace_seconds
        self.port = port
        self.address = f"{host}:{port}"

    async def ready(self) -> None:
        """Report SERVING."""
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def not_ready(self) -> None:
        """Report NOT_SERVING, as before the first ``ready`` and while draining; calls are still taken."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, drain: Drain | None = None) -> None:
        """Report NOT_SERVING, refuse new calls, let running ones end within the grace, cancel the others.

        ``drain`` comes first and within the same grace, while calls are still taken: for a server whose
        running calls need further ones to end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_seconds
        await self._health.enter_graceful_shutdown()
        if drain is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await drain()
        await self._server.stop(max(0.0, deadline - loop.time()))

    async def _set_health(self, status: Any) -> None:
        for name in ("", *self._service_names):
            await self._health.set(name, status)


@asynccontextmanager
async def grpc_server(
    services: Sequence[Service],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    registry: CollectorRegistry,
    grace_seconds: float = 5.0,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
) -> AsyncIterator[GrpcServer]:
    """Serve ``services`` until the context ends; port 0 takes a free one, found in ``GrpcServer.port``.

    Without ``credentials`` connections are plain. ``interceptors`` come before requests are read; what they
    raise becomes a status. Health is NOT_SERVING until ``GrpcServer.ready`` is called.

    Raises:
        OSError: the address cannot be bound.
    """
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor(GrpcMetrics(registry)), *interceptors, RequestIntake()],
        options=server_options(max_message_bytes),
    )
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for service in services:
        service.add_to_server(service.servicer, server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    running = GrpcServer(
        server, health_servicer, names, host, _bind(server, host, port, credentials), grace_seconds
    )
    await running.not_ready()
    await server.start()
    try:
        yield running
    finally:
        await running.stop()


def end_on_sigterm() -> None:
    """Let SIGTERM end the process at once, until ``serve_until_signal`` takes the signal over.

    A container's first process ignores the signals that it has no handler for: one that still loads its model
    could not be stopped.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


async def serve_until_signal(
    server: GrpcServer, drain: Drain | None = None, failure: asyncio.Future[E] | None = None
) -> None:
    """Wait for SIGTERM or SIGINT, then stop the server gracefully; a second signal ends the process.

    Raises:
        E: what ``failure`` brought meanwhile; the server has been stopped without a drain.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()
    signals = (signal.SIGTERM, signal.SIGINT)
    for each in signals:
        loop.add_signal_handler(each, _resolve, received, each)
    ends: list[asyncio.Future[Any]] = [received] if failure is None else [received, failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
    if failure is not None and failure.done():
        _log.error("server_failed", address=server.address, details=str(failure.result()))
        await server.stop()
        raise failure.result()
    _log.info("server_stopping", address=server.address, signal=received.result().name)
    await server.stop(drain)


def _resolve(future: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    if not future.done():
        future.set_result(number)


class GrpcMetrics:
    """Counts of the calls that a server handled."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.handled = Counter(
            "grpc_server_handled_total",
            "Calls that the server finished, by method and status code.",
            ["grpc_method", "grpc_code"],
            registry=registry,
        )


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns typed errors into statuses with ``google.rpc.ErrorInfo``, and everything else into INTERNAL.

    Streaming handlers must be async generators.
    """

    def __init__(self, metrics: GrpcMetrics) -> None:
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the call's handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        method = handler_call_details.method.rpartition("/")[2]
        kind = _handler_kind(handler)
        inner = getattr(handler, kind)
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        return handler._replace(**{kind: wrap(method, inner)})

    def _wrap_unary(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            with self._recording(method, context) as call:
                try:
                    return await inner(request, context)
                except Exception as error:
                    await call.fail(error)

        return call

    def _wrap_stream(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        if not inspect.isasyncgenfunction(inner):
            raise TypeError(f"{method}: a streaming handler must be an async generator")

        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._recording(method, context) as call:
                try:
                    async with aclosing(inner(request, context)) as responses:
                        async for response in responses:
                            yield response
                except Exception as error:
                    await call.fail(error)

        return call

    @contextmanager
    def _recording(self, method: str, context: Any) -> Iterator[_Call]:
        call = _Call(method, context)
        try:
            yield call
        except (asyncio.CancelledError, GeneratorExit):
            call.code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._metrics.handled.labels(method, call.code.name).inc()


class _Call:
    """One call being handled, and how it ended."""

    def __init__(self, method: str, context: Any) -> None:
        self._method = method
        self._context = context
        self.code = grpc.StatusCode.OK

    async def fail(self, error: Exception) -> None:
        """End the call with the status of ``error``; does not return."""
        if isinstance(error, grpc.aio.AbortError):
            self.code = self._context.code()
            raise error
        if isinstance(error, grpc.aio.InternalError):
            # gRPC could not send the handler's message or status: the client has left. gRPC passes over it.
            self.code = grpc.StatusCode.CANCELLED
            raise error
        if not isinstance(error, ServiceError):
            _log.exception("call_failed", method=self._method)
            error = Internal("internal error; the server's log has the details")
        self.code = error.code
        await self._context.abort_with_status(rpc_status.to_status(to_status(error)))


def _handler_kind(handler: Any) -> str:
    request = "stream" if handler.request_streaming else "unary"
    response = "stream" if handler.response_streaming else "unary"
    return f"{request}_{response}"


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise cannot_listen(host, port, error) from error
    if not bound:
        raise cannot_listen(host, port)
    return bound
