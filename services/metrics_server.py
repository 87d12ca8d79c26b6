"""Serves a Prometheus registry over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server


@contextmanager
def metrics_server(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Serve ``registry`` from a thread until the context ends; yield the bound port."""
    server, thread = start_http_server(port, addr=host, registry=registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
