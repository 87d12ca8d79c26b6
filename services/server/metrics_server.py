"""Serves a Prometheus registry and the answers to health probes over HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from quire.rpc.errors import cannot_listen
from quire.rpc.health import READY, Health
from quire.rpc.server import GrpcServer
from quire.services.server.loop_lag import STUCK_SECONDS, LoopLagMetrics

STOP_POLL_SECONDS = 0.05
READ_SECONDS = 10.0
"""Time limit for a request: a silent connection would keep its thread and its descriptor."""


class _Server(ThreadingWSGIServer):
    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, or pause after an error: while it is queued the thread would spin."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(STOP_POLL_SECONDS)
            raise


class Probes(NamedTuple):
    """The answers to health probes, given from a thread that does not depend on the event loop."""

    server: GrpcServer
    lag: LoopLagMetrics

    @property
    def stuck(self) -> Health | None:
        """What is wrong if the event loop is stuck: the process is dead, and only a restart helps."""
        late = self.lag.late_seconds
        return Health("stalled", f"the event loop is {late:.0f} s late") if late > STUCK_SECONDS else None

    @property
    def health(self) -> Health:
        """Whether the process can serve a request now, as gRPC's health service reports it."""
        return self.stuck or self.server.health


def describe_readiness(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> None:
    """Publish whether the process can serve a request now."""
    gauge = Gauge("quire_ready", "1 if the process can serve a request now.", registry=registry)
    gauge.set_function(is_ready)


class _Ipv6Server(_Server):
    """A server that listens on an IPv6 address."""

    address_family = socket.AF_INET6


class _QuietHandler(WSGIRequestHandler):
    """A request handler that logs neither scrapes nor disconnects."""

    timeout = READ_SECONDS

    def handle(self) -> None:
        """Answer a request."""
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Ignore the message."""


@contextmanager
def metrics_server(
    registry: CollectorRegistry, probes: Probes, host: str = "127.0.0.1", port: int = 0
) -> Iterator[int]:
    """Serve ``registry``, ``/health`` and ``/ready`` from a thread until the context ends; yield the port.

    Raises:
        OSError: the address cannot be bound.
    """
    describe_readiness(registry, lambda: probes.health.is_ready)
    app = _app(registry, probes)
    # Not prometheus_client's own start_http_server, which takes half a second to stop.
    try:
        kind = _Ipv6Server if ":" in host else _Server
        listening = make_server(host.strip("[]"), port, app, kind, handler_class=_QuietHandler)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    with listening as server:
        thread = Thread(target=server.serve_forever, args=(STOP_POLL_SECONDS,), name="metrics", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def _app(registry: CollectorRegistry, probes: Probes) -> Callable[..., Iterable[bytes]]:
    metrics: Callable[..., Iterable[bytes]] = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/health":
                health, well = probes.stuck or READY, "alive"
            case "/ready":
                health, well = probes.health, "ready"
            case _:
                return metrics(environ, start_response)
        code = "200 OK" if health.is_ready else "503 Service Unavailable"
        start_response(code, [("Content-Type", "application/json")])
        answer = {"status": well if health.is_ready else health.status, "reason": health.reason}
        return [f"{json.dumps(answer)}\n".encode()]

    return app
