"""Reads what a client sent, and what its headers say about it."""

from __future__ import annotations

import asyncio
import secrets
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quire.services.errors import InvalidArgument
from quire.services.router.http.errors import invalid_body
from quire.services.router.http.responses import to_json
from quire.services.validation import check_request_id, is_request_id

REQUEST_ID = web.RequestKey("request_id", str)
"""Under this, an answer's header and the log find the request's id."""
BODY_SECONDS = web.AppKey("body_seconds", float)
"""Under this, the application holds the time for a request's body."""
REQUEST_ID_HEADER = "X-Request-Id"
T = TypeVar("T", bound=BaseModel)


async def read_body(request: web.Request, kind: type[T]) -> T:
    """Return the body of a request.

    Raises:
        InvalidArgument: names the field.
        HTTPUnsupportedMediaType: it is not JSON.
        HTTPRequestTimeout: it did not come in time.
        HTTPRequestEntityTooLarge: it is larger than the server takes.
    """
    # Without this rule any page in a browser could post to a server on the reader's machine.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send JSON, with the header content-type: application/json")
    body = await _read(request)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_body(error, body) from None


async def _read(request: web.Request) -> bytes:
    seconds = request.app[BODY_SECONDS]
    try:
        async with asyncio.timeout(seconds):
            return await request.read()
    except web.RequestPayloadError:
        raise InvalidArgument(
            "body", "is not what its content-encoding or transfer-encoding says", reason="MALFORMED_BODY"
        ) from None
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the body did not arrive within {seconds:g} s of its headers"
        ) from None


def json_response(
    body: BaseModel, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return a response with a JSON body."""
    return web.Response(
        body=to_json(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def first_request_id(request: web.Request) -> str:
    """Return the id that the header chose, where it may, or a new one; the body is not known yet."""
    chosen = request.headers.get(REQUEST_ID_HEADER, "")
    return chosen if is_request_id(chosen) else secrets.token_hex(16)


def request_id(request: web.Request, chosen: str | None) -> str:
    """Return the id that the body or the header chose, or the one that the request has.

    Raises:
        InvalidArgument: an id cannot be this.
    """
    name = chosen or request.headers.get(REQUEST_ID_HEADER) or request[REQUEST_ID]
    check_request_id(name)
    request[REQUEST_ID] = name
    return name
