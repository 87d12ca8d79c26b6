"""Clients that mean harm, over HTTP: what they send is not repeated, and how long they take is limited."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.services.router.config import HttpTimes
from tests.testing.until import until

KEY = "quire-a-key-that-stays-secret"
PATIENCE_SECONDS = 10.0
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}".encode()

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(pair: Any) -> AsyncIterator[Pipe]:
    reader, writer = await asyncio.open_connection("127.0.0.1", pair.running.http.port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield reader, writer
    finally:
        writer.close()


async def answered(reader: asyncio.StreamReader) -> tuple[bytes, Any]:
    """Return the head and the body of an answer after which the connection ends."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    return head, json.loads(body)


@pytest.mark.parametrize(
    "sent",
    [
        GET + b"\x01\r\n\r\n",
        GET + b"\r\nno header\r\n\r\n",
        GET + b"\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        GET.replace(b"HTTP/1.1", b"HTTP/9.9") + b"\r\n\r\n",
        GET.replace(b"/v1", b"http://[/") + b"\r\n\r\n",
        POST
        + f"Authorization: Bearer {KEY}\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{{}}".encode(),
        POST + f"Authorization: Bearer {KEY}\r\nContent-Length: x\r\n\r\n{{}}".encode(),
        f"{KEY}\r\n\r\n".encode(),
        b"\x16\x03\x01\x02" + KEY.encode(),
    ],
)
async def test_malformed_bytes_are_not_repeated(
    http: ClientSession, pair: Any, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    async with connected(pair) as (reader, writer):
        writer.write(sent)
        head, body = await answered(reader)
    assert head.startswith(b"HTTP/1.0 400") or head.startswith(b"HTTP/1.1 400")
    assert b"Server: quire\r\n" in head
    assert body["error"]["code"] == "malformed_request"
    assert KEY not in json.dumps(body) + caplog.text
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]
    assert pair.metric("quire_http_requests_total", route="unknown", status="400") == 1


async def test_too_many_headers_are_called_that(http: ClientSession, pair: Any) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(GET + b"\r\n" + b"".join(b"X-%d: x\r\n" % number for number in range(127)) + b"\r\n")
        _, body = await answered(reader)
    assert body["error"]["code"] == "malformed_request"
    assert body["error"]["message"] == "the request has more than 128 headers"


@pytest.mark.parametrize(
    "body",
    [
        b"Content-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + KEY.encode()[:20],
        b"Content-Encoding: deflate\r\nContent-Length: 20\r\n\r\n" + KEY.encode()[:20],
        b"Transfer-Encoding: chunked\r\n\r\n" + KEY.encode() + b"\r\n",
    ],
)
async def test_a_body_that_contradicts_its_headers(
    http: ClientSession, pair: Any, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(POST + b"Connection: close\r\n" + body)
        head, answer = await answered(reader)
    assert b" 400 " in head.splitlines()[0]
    assert answer["error"]["code"] in ("malformed_body", "malformed_request")
    assert KEY[:20] not in caplog.text + json.dumps(answer)


async def silent(writer: asyncio.StreamWriter) -> None:
    """Say nothing."""


async def half(writer: asyncio.StreamWriter) -> None:
    """Begin to say who one is."""
    writer.write(GET)


async def drip(writer: asyncio.StreamWriter) -> None:
    """Say a byte now and then, without an end."""
    writer.write(GET + b"\r\nX: ")
    with suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("send", [silent, half, drip])
async def test_headers_time_out(
    start: Any, pair: Any, send: Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]
) -> None:
    await start(http_times=HttpTimes(head_seconds=0.1))
    async with connected(pair) as (reader, writer):
        sending = asyncio.create_task(send(writer))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        sending.cancel()


async def test_a_connection_that_has_been_of_use_ends_too(start: Any, pair: Any) -> None:
    await start(http_times=HttpTimes(head_seconds=0.1))
    async with connected(pair) as (reader, writer):
        writer.write(GET + b"\r\n\r\n" + b"GET /v1/models HTTP/1.1\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")


async def test_a_body_times_out(start: Any, pair: Any) -> None:
    await start(http_times=HttpTimes(body_seconds=0.1))
    async with connected(pair) as (reader, writer):
        writer.write(POST + b"Content-Length: 99\r\n\r\n{")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"Connection: close" in head
        assert b"within 0.1 s" in await reader.readuntil(b"}}")


async def test_each_part_of_a_body_times_out(start: Any, pair: Any) -> None:
    await start(http_times=HttpTimes(piece_seconds=0.1))
    async with connected(pair) as (reader, writer):
        writer.write(POST + b"Content-Length: 9999\r\n\r\n" + b" " * 2000)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert b"1024 bytes in each 0.1 s" in await reader.readuntil(b"}}")


async def endlessly(writer: asyncio.StreamWriter, sent: bytes) -> None:
    """Send the same bytes until the server ends the connection."""
    with suppress(ConnectionError):
        while True:
            writer.write(sent)
            await writer.drain()


@pytest.mark.parametrize(("path", "status"), [(b"/nope", b"404"), (b"/health", b"405")])
async def test_a_body_is_not_read_after_its_request_was_answered(
    http: ClientSession, pair: Any, path: bytes, status: bytes
) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(POST.replace(b"/v1/completions", path) + b"Transfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(endlessly(writer, b"1\r\na\r\n" * 10_000))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert b"Connection: close\r\n" in head
        with suppress(ConnectionError):
            await reader.read()
        sending.cancel()


async def test_a_connection_stays_open_after_a_refusal_if_the_body_has_arrived(
    http: ClientSession, pair: Any
) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(POST.replace(b"/v1/completions", b"/nope") + b"Content-Length: 2\r\n\r\n{}")
        writer.write(GET.replace(b"/v1/models", b"/health") + b"\r\nConnection: close\r\n\r\n")
        answers = await reader.read()
    assert [answers.count(status) for status in (b"HTTP/1.1 404", b"HTTP/1.1 200")] == [1, 1]


async def test_a_body_in_tiny_chunks_is_refused(http: ClientSession, pair: Any) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        sending = asyncio.create_task(endlessly(writer, b"1\r\na\r\n" * 1000))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert b"chunks of fewer than 10 bytes" in await reader.readuntil(b"}}")
        sending.cancel()


async def test_a_body_in_small_chunks_is_read(http: ClientSession, pair: Any) -> None:
    body = b'{"prompt": ' + b" " * (128 << 10) + b"5}"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in _pieces(body, 10))
    async with connected(pair) as (reader, writer):
        writer.write(POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")
        # The request is under way before the chunks arrive, so that all of them count.
        await asyncio.sleep(0)
        writer.write(chunks + b"0\r\n\r\n")
        _, answer = await answered(reader)
    assert answer["error"]["param"] == "prompt"


def _pieces(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


@pytest.mark.parametrize("coding", ["identity, chunked", "gzip, chunked"])
async def test_only_chunked_is_a_transfer_coding(http: ClientSession, pair: Any, coding: str) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(POST + f"Transfer-Encoding: {coding}\r\n\r\n".encode() + b"2\r\n{}\r\n0\r\n\r\n")
        head, body = await answered(reader)
    assert head.startswith(b"HTTP/1.1 400")
    assert body["error"]["message"].startswith("Transfer-Encoding")


async def test_http_1_0_has_no_transfer_coding(http: ClientSession, pair: Any) -> None:
    async with connected(pair) as (reader, writer):
        head = POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: keep-alive\r\n"
        writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
        head, body = await answered(reader)
    assert b" 400 " in head.splitlines()[0]
    assert body["error"]["message"].startswith("Transfer-Encoding")


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nope"])
async def test_an_unknown_expectation_gets_a_status(http: ClientSession, pair: Any, path: bytes) -> None:
    async with connected(pair) as (reader, writer):
        writer.write(POST.replace(b"/v1/completions", path) + b"Expect: 999\r\nContent-Length: 2\r\n\r\n{}")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 417")


async def test_a_client_that_does_not_read_is_disconnected(start: Any, pair: Any) -> None:
    pair.script.answer[-1:] = pair.script.answer[:4] * 10
    await start(http_times=HttpTimes(read_seconds=0.1))
    (listening,) = pair.running.http._listening.sockets
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps({"prompt": "say it", "n": 64, "stream": True, "logprobs": 0, "max_tokens": 50}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", pair.running.http.port))
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(*(worker.ended.wait() for worker in (await _asked(pair))))
            await until(lambda: not pair.metric("quire_router_requests_running"))
            # The handler counts the request after the router's call has ended.
            requests = "quire_http_requests_total"
            await until(lambda: pair.metric(requests, route="/v1/completions", status="499") == 1)


async def _asked(pair: Any) -> list[Any]:
    """Return the workers that have a part in a request, once there are two."""
    while len(asked := [worker for worker in pair.workers.values() if worker.calls]) < 2:
        await asyncio.sleep(0.005)
    return asked
