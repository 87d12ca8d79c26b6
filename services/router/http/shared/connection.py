"""Handles one client's connection: its time limits, and the answer to bytes that are not HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from quire.rpc.errors import InvalidArgument
from quire.rpc.server import PUBLIC_MESSAGE_BYTES
from quire.services.router.config import HttpTimes
from quire.services.router.http.shared.bodies import json_response
from quire.services.router.http.shared.errors import http_error
from quire.services.server.log import EventLogger

SERVER = "quire"
MAX_HEADER_BYTES = 8190
"""Maximum size of a request's first line, and of each header."""
MAX_HEADERS = 128
"""Maximum number of headers; this is aiohttp's fixed limit."""
MIN_READ_BYTES = 16 << 10
"""Minimum that a client must read within ``read_seconds`` while data waits for it; a client that reads less
counts as stalled."""
READ_BYTES = 16 << 10
"""Maximum number of bytes that are read from a connection, and parsed, in one pass of the event loop."""
LINGER_SECONDS = 2.0
"""Time for which the rest of a body is dropped after the answer, which an immediate close would destroy."""
FREE_FRAMING_BYTES = 64 << 10
"""Number of bytes of a body, as sent, from which on its chunks must not be tiny."""
MIN_CHUNK_BYTES = 10

_log = EventLogger("http")
Count = Callable[[str, int], None]
"""A function that counts an answer by its route and status."""


class HttpConnection(web.RequestHandler):
    """aiohttp's connection, but without a client's input in the log or in error messages.

    It also ends the connection of a client that stops reading, and drops what arrives of a body after its
    request was answered.
    """

    __slots__ = ("_count", "_num_dropped", "_num_unread", "_reading", "_receiving", "_times")

    def __init__(self, server: web.Server, times: HttpTimes, count: Count) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp writes no access log then
            # This timeout runs until a request's headers are complete, so it also ends connections that send
            # their headers very slowly.
            keepalive_timeout=times.head_seconds,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            lingering_time=LINGER_SECONDS,
        )
        self._times = times
        self._count = count
        self._reading: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._receiving: tuple[web.BaseRequest | None, int] = (None, 0)
        """The last request whose body arrived while it was handled, and the bytes sent of that body."""
        self._num_dropped: int | None = None
        """Bytes dropped since the last answer; None: nothing is dropped."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let one connection occupy the event loop only for as long as a small read takes."""
        super().connection_made(transport)
        # asyncio's own size, 256 KiB, holds so many tiny chunks that parsing them takes 0.1 s.
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, or drop it if it belongs to a request that was answered already."""
        if self._num_dropped is not None:
            self._num_dropped += len(data)
            if self._num_dropped > PUBLIC_MESSAGE_BYTES and self.transport is not None:
                self.transport.abort()
            return
        request = self._current_request
        if request is not None and not request.content.is_eof():
            of, num_bytes = self._receiving
            self._receiving = (request, len(data) + (num_bytes if of is request else 0))
        super().data_received(data)

    def drop_rest(self) -> None:
        """Drop what arrives from now on; the connection is closed after the answer."""
        self._num_dropped = 0

    def check_chunks(self, request: web.BaseRequest) -> None:
        """Refuse a body in tiny chunks: parsing them costs a hundred times as much as reading the body.

        Raises:
            InvalidArgument: the chunks are too small.
        """
        of, num_sent = self._receiving
        num_framed = num_sent - request.content.total_raw_bytes
        if of is request and num_sent > FREE_FRAMING_BYTES and num_framed * 3 > num_sent:
            raise InvalidArgument(
                "body",
                f"is sent in chunks of fewer than {MIN_CHUNK_BYTES} bytes on average; a body above "
                f"{FREE_FRAMING_BYTES} bytes needs larger ones: join them",
                reason="MALFORMED_BODY",
                metadata={"limit": str(MIN_CHUNK_BYTES)},
            )

    def pause_writing(self) -> None:
        """Begin to watch a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """Stop watching the client, because it has caught up."""
        self._unwatch()
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop watching the client, and cancel its request."""
        self._unwatch()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to bytes that are not a valid request; answer and log do not repeat the bytes."""
        if status >= 500:
            _log.exception("http_failed", peer=request.remote)
            error = http_error(status, "internal error; the server's log has the details", code="internal")
        else:
            _log.info("http_malformed", peer=request.remote, problem=type(exc).__name__)
            problem = "the bytes sent are no HTTP request"
            if isinstance(exc, LineTooLong):
                problem = f"the request's first line or a header is longer than {MAX_HEADER_BYTES} bytes"
            elif isinstance(exc, BadHttpMessage) and "Too many headers" in exc.message:
                problem = f"the request has more than {MAX_HEADERS} headers"
            error = http_error(status, problem, code="malformed_request")
        self._count("unknown", status)
        response = json_response(error.body, status=status, headers={"Server": SERVER})
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log a problem outside a request's handler, such as one with the unread rest of a body."""
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
