"""One client's connection: how long it may take over what, and what it gets for bytes that are no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from quire.services.log import get_logger
from quire.services.router.http.bodies import json_response
from quire.services.router.http.errors import http_error
from quire.services.router.http.times import HttpTimes

SERVER = "quire"
MAX_HEADER_BYTES = 8190
"""Of a request's first line, and of each header."""
MIN_READ_BYTES = 16 << 10
"""Whoever reads fewer within the time, while more wait for it, has stopped reading."""

_log = get_logger("http")
Count = Callable[[str, int], None]
"""Counts an answer, by route and status."""


class Connection(web.RequestHandler):
    """aiohttp's, but what a client sends reaches neither the log nor anybody's screen."""

    __slots__ = ("_count", "_num_unread", "_reading", "_times")

    def __init__(self, server: web.Server, times: HttpTimes, count: Count) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp's way of none
            # Counts until a request's headers are here, so it ends connections that drip them, too.
            keepalive_timeout=times.head_seconds,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        self._times = times
        self._count = count
        self._reading: asyncio.TimerHandle | None = None
        self._num_unread = 0

    def pause_writing(self) -> None:
        """Begin to watch a client that reads more slowly than it is written to."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """End the watch."""
        self._unwatch()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the watch, and cancel the client's request."""
        self._unwatch()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are no request; neither the answer nor the log repeats them."""
        if status >= 500:
            _log.exception("http_failed", peer=request.remote)
            error = http_error(status, "internal error; the server's log has the details", code="internal")
        else:
            _log.info("http_malformed", peer=request.remote, problem=type(exc).__name__)
            problem = "the bytes sent are no HTTP request"
            if isinstance(exc, LineTooLong):
                problem = f"the request's first line or a header is longer than {MAX_HEADER_BYTES} bytes"
            error = http_error(status, problem, code="malformed_request")
        self._count("unknown", status)
        response = json_response(error.body, status=status, headers={"Server": SERVER})
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what went wrong beside a request, as with the rest of a body that nobody wanted."""
        _log.info("http_connection_failed", problem=type(kwargs.get("exc_info")).__name__)

    def _watch(self) -> None:
        assert self.transport is not None
        self._num_unread = self.transport.get_write_buffer_size()
        self._reading = self._loop.call_later(self._times.read_seconds, self._check)

    def _unwatch(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _check(self) -> None:
        self._reading = None
        if self.transport is None:
            return
        if self._num_unread - self.transport.get_write_buffer_size() >= MIN_READ_BYTES:
            self._watch()
            return
        _log.info("http_reader_stalled", unread_bytes=self._num_unread)
        self.transport.abort()
