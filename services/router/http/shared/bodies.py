"""Reads request bodies and request ids, and writes JSON responses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quire.rpc.errors import InvalidArgument
from quire.rpc.request_intake import AddBytes
from quire.rpc.server import PUBLIC_MESSAGE_BYTES
from quire.services.requests.validation import check_request_id, is_request_id
from quire.services.router.config import HttpTimes
from quire.services.router.http.shared.errors import invalid_body
from quire.services.router.http.shared.json_text import to_json, to_json_in_steps
from quire.services.router.tenants.api_keys import Tenant

REQUEST_ID = web.RequestKey("request_id", str)
"""Key under which a request stores its id, for the answer's header and the log."""
ADD_BYTES: web.RequestKey[AddBytes] = web.RequestKey("add_bytes")
"""Key under which a request stores the function that counts its bytes."""
BODY_ACCOUNT = web.RequestKey("body_account", ExitStack)
"""Key under which a request stores the context in which its bytes count."""
TENANT = web.RequestKey("tenant", Tenant)
"""Key under which handlers find the tenant of a request."""
MAX_TOKENS = web.RequestKey("max_tokens", int)
"""Key under which a request stores the most tokens of an answer, if the model leaves room for fewer than it
asks for; of several prompts the smallest number."""
TIMES = web.AppKey("times", HttpTimes)
"""Key under which the application stores the time limits for clients."""
REQUEST_ID_HEADER = "X-Request-Id"
PIECE_BYTES = 1 << 10
"""Bytes of a body that must arrive within each ``HttpTimes.piece_seconds``."""
INLINE_BODY_BYTES = 64 << 10
"""Bodies up to this size are parsed on the event loop (about 1 ms)."""
MAX_JSON_PARTS, MAX_JSON_VALUES = 1 << 15, 1 << 18
"""Maximum number of texts, lists and objects, and of values, in a body; either takes about 50 ms to read."""
T = TypeVar("T", bound=BaseModel)


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Read and check the body of a request, and return it as ``kind``.

    Raises:
        InvalidArgument: the body is invalid; the error names the field.
        HTTPUnsupportedMediaType: the body is not JSON.
        HTTPRequestTimeout: the body did not arrive in time.
        HTTPRequestEntityTooLarge: the body is larger than the server allows.
        ResourceExhausted: the requests under way leave no room for it.
    """
    # Without this rule, any page in a user's browser could post to a server on the user's machine.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send JSON, with the header content-type: application/json")
    body = await _read(request)
    if len(body) <= INLINE_BODY_BYTES:
        return _parse(body, kind)
    return await asyncio.to_thread(_parse, body, kind)


def _parse(body: bytes, kind: type[T]) -> T:
    if len(body) > INLINE_BODY_BYTES:
        _check_values(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, body) from None


def _check_values(body: bytes) -> None:
    """Refuse a body with so many values that reading them would block everything else, even in a thread.

    A body of 16 MiB may contain a million messages or eight million numbers, and take seconds to read.

    Raises:
        InvalidArgument: the body has too many values.
    """
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    num_strings = plain.count(b'"') // 2
    num_parts = num_strings
    num_values = 0
    if num_strings <= MAX_JSON_PARTS:
        # No escaped quotes are left, so every second piece is outside of strings.
        for between in plain.split(b'"')[::2]:
            num_parts += between.count(b"[") + between.count(b"{")
            num_values += between.count(b",")
    for limit, number, name in (
        (MAX_JSON_PARTS, num_parts, "texts, members, lists and objects"),
        (MAX_JSON_VALUES, num_values, "values"),
    ):
        if number > limit:
            raise InvalidArgument(
                "body",
                f"must hold at most {limit} {name}; got {number}: send fewer prompts in a request",
                metadata={"limit": str(limit)},
            )


async def _read(request: web.Request) -> bytes:
    times = request.app[TIMES]
    try:
        async with asyncio.timeout(times.body_seconds):
            return await _read_all(request)
    except web.RequestPayloadError:
        raise InvalidArgument(
            "body", "is not what its content-encoding or transfer-encoding says", reason="MALFORMED_BODY"
        ) from None
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the body did not arrive within {times.body_seconds:g} s of its headers, with at least "
            f"{PIECE_BYTES} bytes in each {times.piece_seconds:g} s: send it faster"
        ) from None


async def _read_all(request: web.Request) -> bytes:
    body, add_bytes, piece_end = bytearray(), request[ADD_BYTES], PIECE_BYTES
    loop, seconds = asyncio.get_running_loop(), request.app[TIMES].piece_seconds
    async with asyncio.timeout(seconds) as limit:
        while chunk := await request.content.readany():
            add_bytes(len(chunk))
            body += chunk
            if len(body) > PUBLIC_MESSAGE_BYTES:
                raise web.HTTPRequestEntityTooLarge(PUBLIC_MESSAGE_BYTES, len(body))
            if len(body) >= piece_end:
                piece_end = len(body) + PIECE_BYTES
                limit.reschedule(loop.time() + seconds)
    return bytes(body)


def json_response(
    body: BaseModel, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(
        body=to_json(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


async def response_in_thread(build: Callable[[], BaseModel], turn: asyncio.Lock | None) -> web.Response:
    """Build a JSON body and return its response, without blocking the event loop.

    Args:
        turn: lets requests build their bodies one after another, because several threads that build keep the
            event loop from running; None: the body is small.
    """
    async with turn or nullcontext():
        body = await asyncio.to_thread(lambda: to_json_in_steps(build()))
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def first_request_id(request: web.Request) -> str:
    """Return the id in the header if it is valid, or else a new one; the body has not been read yet."""
    chosen = request.headers.get(REQUEST_ID_HEADER, "")
    return chosen if is_request_id(chosen) else secrets.token_hex(16)


def request_id(request: web.Request, chosen: str | None) -> str:
    """Return the id from the body or else from the header, or else the one that the request already has.

    Args:
        chosen: the id in the body, if there is one.

    Raises:
        InvalidArgument: the client's id is not valid.
    """
    name = chosen or request.headers.get(REQUEST_ID_HEADER) or request[REQUEST_ID]
    try:
        check_request_id(name)
    except InvalidArgument as error:
        raise error if chosen else error.renamed({"request_id": REQUEST_ID_HEADER}) from None
    request[REQUEST_ID] = name
    return name
