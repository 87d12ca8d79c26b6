"""The proxy of chaos runs: it carries bytes, cuts, delays, resets and damages them, one link at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.soak.chaos.http2_data import LARGE_BYTES, MARGIN_BYTES, LargeDataFinder
from tests.soak.chaos.proxy import Link, process_at, proxy_before

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
SECONDS = 20.0
MESSAGE = b"x" * 100


@asynccontextmanager
async def echo_server() -> AsyncIterator[int]:
    """Yield the port of a server that returns what it gets."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def connected(link: Link) -> AsyncIterator[Connection]:
    """Yield a connection to an echo server through a proxy, over the link of this process."""

    def source_of(port: int, server_port: int) -> str:
        return process_at(port, server_port, {"other": os.getppid(), "this": os.getpid()})

    async with (
        asyncio.timeout(SECONDS),
        echo_server() as port,
        proxy_before(port, {"this": link, "other": Link()}, source_of) as proxy,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def echoed(connection: Connection, message: bytes = MESSAGE) -> bytes:
    reader, writer = connection
    writer.write(message)
    return await reader.readexactly(len(message))


async def test_bytes_and_the_end_arrive() -> None:
    async with connected(Link()) as connection:
        assert await echoed(connection) == MESSAGE
        connection[1].write_eof()
        assert await connection[0].read() == b""


async def test_bytes_sent_while_the_link_is_cut_arrive_later() -> None:
    link = Link()
    async with connected(link) as connection:
        assert await echoed(connection) == MESSAGE
        link.is_open.clear()
        waiting = asyncio.create_task(echoed(connection))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        link.is_open.set()
        assert await waiting == MESSAGE


async def test_a_delay_holds_bytes_back() -> None:
    link = Link(delay_seconds=0.5)
    async with connected(link) as connection:
        waiting = asyncio.create_task(echoed(connection))
        done, _ = await asyncio.wait([waiting], timeout=0.1)
        assert not done
        assert await waiting == MESSAGE


async def test_a_reset_ends_connections_and_a_refusal_new_ones() -> None:
    link = Link()
    async with connected(link) as connection:
        assert await echoed(connection) == MESSAGE
        link.reset()
        with pytest.raises(ConnectionResetError):
            await connection[0].read()
    refusing = Link(is_refused=True)
    async with connected(refusing) as connection:
        with pytest.raises(ConnectionResetError):
            await connection[0].read()


async def test_a_fault_of_one_link_does_not_affect_another() -> None:
    other = Link(is_refused=True)

    def source_of(port: int, server_port: int) -> str:
        return process_at(port, server_port, {"this": os.getpid()})

    async with (
        asyncio.timeout(SECONDS),
        echo_server() as port,
        proxy_before(port, {"this": Link(), "other": other}, source_of) as proxy,
    ):
        connection = await asyncio.open_connection("127.0.0.1", proxy.port)
        assert await echoed(connection) == MESSAGE
        connection[1].close()


async def test_damage_changes_one_bit_as_often_as_it_is_due() -> None:
    link = Link(num_to_damage=1, damages_all=True, damages_answers_only=True)
    async with connected(link) as connection:
        damaged = await echoed(connection)
        different = [a ^ b for a, b in zip(damaged, MESSAGE, strict=True) if a != b]
        assert [bits.bit_count() for bits in different] == [1]
        assert await echoed(connection) == MESSAGE
        assert (link.num_to_damage, link.num_damaged) == (0, 1)


def frame(kind: int, length: int) -> bytes:
    return length.to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 1]) + bytes([kind + 1]) * length


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
@pytest.mark.parametrize("is_from_client", [True, False])
def test_only_the_values_of_large_data_frames_are_found(size: int, is_from_client: bool) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if is_from_client else b""
    stream = preface + b"".join(
        (frame(4, 30), frame(1, 5000), frame(0, LARGE_BYTES), frame(0, 100), frame(0, 0), frame(0, 16_384))
    )
    finder = LargeDataFinder(is_from_client=is_from_client)
    begin, positions = 0, []
    for chunk in pieces(stream, size):
        positions += [begin + at for part in finder.find(chunk) for at in part]
        begin += len(chunk)
    found = bytes(stream[at] for at in positions)
    assert found == b"\x01" * (LARGE_BYTES - MARGIN_BYTES + 16_384 - MARGIN_BYTES)
