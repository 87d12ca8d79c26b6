"""The ids of requests and the bodies that are read: which id counts, and what is refused unread."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request

from quire.rpc.errors import InvalidArgument
from quire.services.router.config import HttpTimes
from quire.services.router.http.openai.answer_bodies import Usage
from quire.services.router.http.openai.requests import TokenizeRequest
from quire.services.router.http.shared.bodies import (
    ADD_BYTES,
    INLINE_BODY_BYTES,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    TIMES,
    first_request_id,
    json_response,
    read_body,
    request_id,
)
from quire.services.router.http.shared.errors import from_service_error


def request(header: str | None = None) -> web.Request:
    headers = {} if header is None else {REQUEST_ID_HEADER: header}
    made = make_mocked_request("POST", "/", headers=headers)
    made[REQUEST_ID] = "chosen by the server"
    return made


@pytest.mark.parametrize("header", [None, "", "with space", "é", "x" * 129])
def test_before_the_body_is_read_a_bad_id_is_replaced(header: str | None) -> None:
    ids = [first_request_id(request(header)) for _ in range(2)]
    assert [len(each) for each in ids] == [32, 32]
    assert ids[0] != ids[1]
    assert first_request_id(request("mine")) == "mine"


@pytest.mark.parametrize(
    ("chosen", "header", "expected"),
    [
        ("body", "header", "body"),
        (None, "header", "header"),
        ("", "header", "header"),
        (None, None, "chosen by the server"),
    ],
)
def test_the_body_has_precedence_over_the_header(
    chosen: str | None, header: str | None, expected: str
) -> None:
    made = request(header)
    if expected == "chosen by the server":
        made[REQUEST_ID] = expected = "0" * 32
    assert request_id(made, chosen) == expected
    assert made[REQUEST_ID] == expected


@pytest.mark.parametrize(
    ("chosen", "header", "field"), [("a b", None, "request_id"), (None, "a b", REQUEST_ID_HEADER)]
)
def test_a_bad_id_is_refused_under_the_name_that_was_sent(
    chosen: str | None, header: str | None, field: str
) -> None:
    made = request(header)
    with pytest.raises(InvalidArgument) as caught:
        request_id(made, chosen)
    assert caught.value.field == field
    assert made[REQUEST_ID] == "chosen by the server", "the answer has a header that is valid"


@pytest.fixture
async def http() -> AsyncIterator[ClientSession]:
    """Return a client of a server that returns the prompt's length."""

    async def handle(made: web.Request) -> web.Response:
        made[ADD_BYTES] = lambda num_bytes: None
        try:
            body = await read_body(made, TokenizeRequest)
        except InvalidArgument as error:
            refused = from_service_error(error)
            return json_response(refused.body, status=refused.status)
        count = len(body.prompt or "")
        return json_response(Usage(prompt_tokens=count, completion_tokens=0, total_tokens=count))

    app = web.Application()
    app[TIMES] = HttpTimes()
    app.router.add_post("/", handle)
    async with TestClient(TestServer(app)) as client:
        session = client.session
        session._base_url = client.make_url("/")
        yield session


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_only_a_json_content_type_is_read(http: ClientSession, content_type: str) -> None:
    async with http.post("/", data=b'{"prompt":"a"}', headers={"Content-Type": content_type}) as answer:
        assert answer.status == 415


@pytest.mark.parametrize("length", [0, 1, INLINE_BODY_BYTES])
async def test_large_bodies_are_read_like_small_ones(http: ClientSession, length: int) -> None:
    async with http.post("/", json={"prompt": "x" * length}) as answer:
        assert (await answer.json())["prompt_tokens"] == length
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("body", "param"), [(b"{", "body"), (b"\xff", "body"), (b"[]", "body"), (b'{"prompt":7}', "prompt")]
)
async def test_the_invalid_field_is_named(http: ClientSession, body: bytes, param: str) -> None:
    async with http.post("/", data=body, headers=JSON) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param
