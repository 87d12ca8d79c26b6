"""Serves a Prometheus registry over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from quire.services.server.errors import cannot_listen

STOP_POLL_SECONDS = 0.05


class _QuietHandler(WSGIRequestHandler):
    """A request handler that does not log scrapes."""

    def log_message(self, format: str, *args: object) -> None:
        """Ignore the message."""


@contextmanager
def metrics_server(registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Serve ``registry`` from a thread until the context ends; yield the bound port.

    Raises:
        OSError: the address cannot be bound.
    """
    app = make_wsgi_app(registry)
    # Not prometheus_client's own start_http_server, which takes half a second to stop.
    try:
        listening = make_server(host, port, app, ThreadingWSGIServer, handler_class=_QuietHandler)
    except OSError as error:
        raise cannot_listen(host, port, error.strerror) from error
    with listening as server:
        thread = Thread(target=server.serve_forever, args=(STOP_POLL_SECONDS,), name="metrics", daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
