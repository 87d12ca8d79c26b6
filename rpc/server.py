"""Builds quire's gRPC servers, with health, reflection, limits, typed errors, metrics and a graceful stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry, Counter

from quire.rpc.call_limits import READ_SECONDS, CallLimits, remember_parents
from quire.rpc.channels import MAX_MESSAGE_BYTES, PING_TIMEOUTS
from quire.rpc.ended_calls import end_raised
from quire.rpc.errors import BadFileError, Internal, ServiceError, Unavailable, cannot_listen, to_status
from quire.rpc.health import READY, STARTING, STOPPING, Health, HealthServicer
from quire.rpc.interceptors import OwnCalls, handler_kind
from quire.rpc.request_intake import Memory, RequestIntake, unbounded

PUBLIC_MESSAGE_BYTES = 16 << 20
MAX_CONCURRENT_STREAMS = 4096
HANDSHAKE_SECONDS = 20.0
MIN_PING_SECONDS = 5.0
LOOK_SECONDS = 0.5
"""Interval at which a stopping server checks how many calls it waits for."""
TELL_SECONDS = 5.0
"""Interval at which a stopping server reports that number if it has not changed."""

NO_RETRY = ("grpc-retry-pushback-ms", "-1")
"""Trailing metadata by which a server tells a channel not to send a call again."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger("quire.grpc")
E = TypeVar("E", bound=Exception)
ServerOptions = list[tuple[str, int]]
Drain = Callable[[], Awaitable[None]]


class Draining(NamedTuple):
    """The number of requests that a stopping server waits for, and the time left for them."""

    num_requests: int
    seconds_left: float


class Stop(NamedTuple):
    """Functions that a server calls while it stops after a signal.

    Attributes:
        drain: returns when the running calls have ended; until then, the server accepts further calls.
        num_requests: returns the number of calls that the server waits for.
        tell: called with that number and the remaining time: immediately, at each change, every
            ``TELL_SECONDS``, and when the time is over.
    """

    drain: Drain
    num_requests: Callable[[], int]
    tell: Callable[[Draining], None]


class Service(NamedTuple):
    """A service: the generated ``add_XServicer_to_server``, the servicer, and the name ``package.X``."""

    add_to_server: Callable[..., Any]
    servicer: object
    full_name: str


def server_options(
    max_message_bytes: int, min_ping_seconds: float = MIN_PING_SECONDS, *, shares_port: bool = False
) -> ServerOptions:
    """Return the gRPC options of a server.

    Args:
        max_message_bytes: size of the largest message that it accepts.
        min_ping_seconds: interval at which a client may ping.
        shares_port: whether other processes may listen on the same port and share the connections.
    """
    return [
        # The default of 4 MiB is too small for a long prompt or a batch of KV blocks.
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Otherwise one broken client could open streams until the process runs out of memory.
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # By default a connection that never completes its handshake would be kept for two minutes.
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_SECONDS)),
        # By default a client that pings during a long prefill is disconnected with GOAWAY too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", int(1000 * min_ping_seconds)),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client whose machine vanished sends no FIN: without pings its requests would keep their blocks.
        ("grpc.keepalive_time_ms", 30_000),
        *PING_TIMEOUTS,
        # With SO_REUSEPORT a second server on the same port would start without an error and get half of the
        # calls.
        ("grpc.so_reuseport", int(shares_port)),
    ]


class GrpcServer:
    """A started server, with its address, its health status and its graceful stop."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: HealthServicer,
        service_names: Sequence[str],
        host: str,
        port: int,
        grace_seconds: float,
    ) -> None:
        self._server = server
        self._health = health_servicer
        self._names = ("", *service_names)
        self._grace_seconds = grace_seconds
        self._before_end: list[Callable[[], None]] = []
        self._is_stopping = False
        self.port = port
        self.address = f"{host}:{port}"

    @property
    def health(self) -> Health:
        """What health checks get; before the first report, the server is starting."""
        return self._health.health

    async def report(self, health: Health) -> None:
        """Tell health checks this, unless the server stops; it accepts calls in any case."""
        if not self._is_stopping:
            await self._health.report(health, self._names)

    async def ready(self) -> None:
        """Report that the server can serve."""
        await self.report(READY)

    async def stop(self, stop: Stop | None = None) -> None:
        """Report that it stops, refuse new calls, and cancel running calls that do not end within the grace.

        ``stop.drain`` runs first, within the same grace, while the server still accepts calls: some servers
        need further calls before their running calls can end.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._grace_seconds
        self._is_stopping = True
        await self._health.report(STOPPING, self._names)
        await self._health.enter_graceful_shutdown()
        if stop is not None:
            await _drain(stop, deadline)
        for call in self._before_end:
            call()
        await self._server.stop(max(0.0, deadline - loop.time()))

    def call_before_end(self, function: Callable[[], None]) -> None:
        """Call a function after the drain, to end the calls that would not end by themselves."""
        self._before_end.append(function)


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
    read_seconds: float = READ_SECONDS,
    call_seconds: float | None = None,
    memory: Memory = unbounded,
    checks_parts: bool = False,
    min_ping_seconds: float = MIN_PING_SECONDS,
    shares_port: bool = False,
) -> AsyncIterator[GrpcServer]:
    """Serve ``services`` until the context ends; ``GrpcServer.report`` tells its health.

    Args:
        port: 0: any free port, which ``GrpcServer.port`` contains.
        credentials: None: connections are plain.
        interceptors: run before requests are read; the errors that they raise become statuses.
        read_seconds: see ``CallLimits``.
        call_seconds: see ``CallLimits``.
        memory: see ``RequestIntake``.
        checks_parts: see ``RequestIntake``.
        min_ping_seconds: see ``server_options``.
        shares_port: see ``server_options``.

    Raises:
        OSError: the address cannot be bound.
    """
    remember_parents()
    server = grpc.aio.server(
        interceptors=[
            ErrorInterceptor(registry),
            CallLimits(read_seconds, call_seconds),
            *interceptors,
            RequestIntake(memory=memory, checks_parts=checks_parts),
        ],
        options=server_options(max_message_bytes, min_ping_seconds, shares_port=shares_port),
    )
    health_servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    for service in services:
        service.add_to_server(service.servicer, server)
    names = [service.full_name for service in services]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    running = GrpcServer(
        server, health_servicer, names, host, _bind(server, host, port, credentials), grace_seconds
    )
    await running.report(STARTING)
    await server.start()
    try:
        yield running
    finally:
        await running.stop()


async def _drain(stop: Stop, deadline: float) -> None:
    """Wait until the drain has ended or its time is over; meanwhile report how many requests remain."""
    loop = asyncio.get_running_loop()
    draining = asyncio.ensure_future(stop.drain())
    told = Draining(-1, 0.0)
    try:
        # Give the drain one step: if there is nothing to wait for, it ends here.
        await asyncio.sleep(0)
        while not draining.done():
            now = Draining(stop.num_requests(), max(0.0, deadline - loop.time()))
            is_due = told.seconds_left - now.seconds_left >= TELL_SECONDS
            if now.num_requests != told.num_requests or is_due or not now.seconds_left:
                told = now
                stop.tell(now)
            if not now.seconds_left:
                return
            await asyncio.wait([draining], timeout=min(now.seconds_left, LOOK_SECONDS))
        draining.result()
    finally:
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)


def tell_log(waiting: Draining) -> None:
    """Log how many requests a stopping server waits for, or how many it cuts off when the time is over."""
    if waiting.seconds_left:
        _log.info(
            "server_draining",
            extra={"fields": {"requests": waiting.num_requests, "seconds_left": round(waiting.seconds_left)}},
        )
    else:
        _log.warning("requests_cut_off", extra={"fields": {"requests": waiting.num_requests}})


def end_on_signals() -> None:
    """Make SIGTERM or SIGINT end the process immediately, until ``serve_until_signal`` handles them.

    A container's first process ignores signals without a handler, so it could not be stopped while it loads
    its model. A process in the background of a script ignores SIGINT unless it has a handler.
    """
    for each in STOP_SIGNALS:
        signal.signal(each, lambda number, frame: os._exit(128 + number))


async def serve_until_signal(
    server: GrpcServer, stop: Stop | None = None, failure: asyncio.Future[E] | None = None
) -> None:
    """Wait for SIGTERM or SIGINT, then stop the server gracefully; a second signal ends the process.

    Args:
        failure: resolves with an error that ends the server.

    Raises:
        E: ``failure`` resolved before a signal arrived; the server was stopped without a drain.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Future[signal.Signals] = loop.create_future()
    for each in STOP_SIGNALS:
        loop.add_signal_handler(each, _resolve, received, each)
    ends: list[asyncio.Future[Any]] = [received] if failure is None else [received, failure]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in STOP_SIGNALS:
            loop.remove_signal_handler(each)
        end_on_signals()
    if failure is not None and failure.done():
        if not isinstance(failure.result(), BadFileError):  # the command prints this error as one sentence
            _log.error(
                "server_failed",
                extra={"fields": {"address": server.address, "details": str(failure.result())}},
            )
        await server.stop()
        raise failure.result()
    _log.info(
        "server_stopping", extra={"fields": {"address": server.address, "signal": received.result().name}}
    )
    await server.stop(stop)


def _resolve(future: asyncio.Future[signal.Signals], number: signal.Signals) -> None:
    if not future.done():
        future.set_result(number)


class ErrorInterceptor(OwnCalls):
    """Turns a ``ServiceError`` into its status with ``google.rpc.ErrorInfo``, and other errors into INTERNAL.

    A call that ``end_call`` has ended gets the status of its error. The handlers must not be generators:
    ``CallLimits`` writes the messages of streams. It also counts the calls.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handled = Counter(
            "grpc_server_handled_total",
            "Calls that the server finished, by method and status code.",
            ["grpc_method", "grpc_code"],
            registry=registry,
        )

    def change(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that also turns the errors of the call's own handler into statuses."""
        method = details.method.rpartition("/")[2]
        kind = handler_kind(handler)
        return handler._replace(**{kind: self._wrap(method, getattr(handler, kind))})

    def _wrap(self, method: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            with self._recording(method, context) as call:
                try:
                    # gRPC sends no status for a cancelled handler: a caller who still reads would wait
                    # indefinitely.
                    with end_raised():
                        return await inner(request, context)
                except Exception as error:
                    await call.fail(error)

        return call

    @contextmanager
    def _recording(self, method: str, context: Any) -> Iterator[_Call]:
        call = _Call(method, context)
        try:
            yield call
        except asyncio.CancelledError:
            call.code = grpc.StatusCode.CANCELLED
            raise
        finally:
            self._handled.labels(method, call.code.name).inc()


class _Call:
    """One call that is being handled, and the status with which it ended."""

    def __init__(self, method: str, context: Any) -> None:
        self._method = method
        self._context = context
        self.code = grpc.StatusCode.OK

    async def fail(self, error: Exception) -> None:
        """End the call with the status of ``error``. This always raises."""
        if isinstance(error, grpc.aio.AbortError):
            self.code = self._context.code()
            raise error
        if isinstance(error, grpc.aio.InternalError):
            # gRPC could not send the handler's message or status because the client has left. gRPC ignores
            # this error.
            self.code = grpc.StatusCode.CANCELLED
            raise error
        if not isinstance(error, ServiceError):
            _log.exception("call_failed", extra={"fields": {"method": self._method}})
            error = Internal("internal error; the server's log has the details")
        self.code = error.code
        status = rpc_status.to_status(to_status(error))
        metadata = tuple(status.trailing_metadata)
        if isinstance(error, Unavailable) and error.has_waited:
            metadata += (NO_RETRY,)
        await self._context.abort(status.code, status.details, metadata)


def _bind(server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    address = f"{host}:{port}"
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise cannot_listen(host, port, bind_problem(host, port)) from error
    if not bound:
        raise cannot_listen(host, port, None)
    return bound


def bind_problem(host: str, port: int) -> OSError | None:
    """Return the system's reason why an address cannot be bound, which gRPC does not report."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            # Connections that have just ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error
    return None
