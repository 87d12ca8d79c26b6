"""A TCP proxy before one server, which can cut, delay, reset and damage what it forwards.

Which process is at the other end of a connection decides to which link the connection belongs, so that a
fault meets one pair of processes only.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.chaos.http2_data import LargeDataFinder

SourceOf = Callable[[int, int], str]
"""Returns the name of the process that connects from a port to a port on this machine; empty if none does."""

_CHUNK_BYTES = 1 << 16
_NETLINK_SOCK_DIAG, _SOCK_DIAG, _NLM_F_REQUEST = 4, 20, 1
_ALL_STATES, _NO_COOKIE = 0xFFF, 0xFFFFFFFF
_HEADER_BYTES = 16
_INODE_OFFSET = _HEADER_BYTES + 4 + 48 + 16
"""Header, family to retransmits, the identity of the socket, then four numbers of ``inet_diag_msg``."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""``SO_LINGER`` without any time: closing sends RST in place of FIN."""


@dataclass
class Link:
    """The connections from one process to one server, and what is wrong with them.

    Attributes:
        is_open: while cleared, nothing that is sent arrives, and no connection is closed.
        delay_seconds: time that each chunk is held back.
        is_refused: whether new connections are reset.
        num_to_damage: chunks in which one bit will be changed, as soon as there is a place for it.
        damages_answers_only: whether only bytes that the server sends are changed.
        damages_all: whether any byte may be changed, and not only values of blocks in gRPC messages.
        place: where in a chunk, from 0 to 1.
        num_damaged: chunks that were changed so far.
    """

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    delay_seconds: float = 0.0
    is_refused: bool = False
    num_to_damage: int = 0
    damages_answers_only: bool = False
    damages_all: bool = False
    place: float = 0.5
    num_damaged: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.is_open.set()

    def reset(self) -> None:
        """End all connections with RST."""
        for writer in list(self._writers):
            _reset(writer)

    async def forward(
        self, client: tuple[asyncio.StreamReader, asyncio.StreamWriter], server_port: int
    ) -> None:
        """Carry bytes between a client and a server until one of them ends the connection."""
        if self.is_refused:
            _reset(client[1])
            return
        await self.is_open.wait()
        try:
            server = await asyncio.open_connection("127.0.0.1", server_port)
        except OSError:
            # The server does not run: this is what its system would answer.
            _reset(client[1])
            return
        writers = {client[1], server[1]}
        self._writers |= writers
        try:
            to_server = self._copy(client[0], server[1], is_from_client=True)
            to_client = self._copy(server[0], client[1], is_from_client=False)
            await asyncio.gather(to_server, to_client)
        finally:
            self._writers -= writers
            for writer in writers:
                writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_from_client: bool
    ) -> None:
        finder = LargeDataFinder(is_from_client=is_from_client)
        try:
            while chunk := await reader.read(_CHUNK_BYTES):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                chunk = self._damaged(chunk, finder, is_from_client=is_from_client)
                await self.is_open.wait()
                writer.write(chunk)
                await writer.drain()
            await self.is_open.wait()
            writer.write_eof()
        except OSError:
            # One side was reset, so the other side gets the same.
            _reset(writer)

    def _damaged(self, chunk: bytes, finder: LargeDataFinder, *, is_from_client: bool) -> bytes:
        """Return a chunk, with one bit changed if that is due and the chunk has a byte that may change."""
        places = [range(len(chunk))] if self.damages_all else finder.find(chunk)
        if self.num_to_damage <= 0 or not places or (is_from_client and self.damages_answers_only):
            return chunk
        self.num_to_damage -= 1
        self.num_damaged += 1
        largest = max(places, key=len)
        at = largest[int(self.place * len(largest))]
        return chunk[:at] + bytes([chunk[at] ^ 1 << at % 8]) + chunk[at + 1 :]


class Proxy:
    """Forwards connections to a server's port.

    Attributes:
        port: where the proxy listens.
        server_port: where the server listens.
    """

    def __init__(self, server_port: int, links: Mapping[str, Link], source_of: SourceOf) -> None:
        self.port = 0
        self.server_port = server_port
        self._links = links
        self._source_of = source_of
        self._tasks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            link = self._links.get(self._source_of(writer.get_extra_info("peername")[1], self.port))
            # Without a link, the process that connected has ended meanwhile.
            if link is not None:
                await link.forward((reader, writer), self.server_port)
        finally:
            writer.close()

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy_before(
    server_port: int, links: Mapping[str, Link], source_of: SourceOf, port: int = 0
) -> AsyncIterator[Proxy]:
    """Run a proxy before a server on this machine.

    Args:
        server_port: the server's port; nothing needs to listen there yet.
        links: the link of each process that may connect, by name.
        source_of: tells the processes apart.
        port: where to listen; 0 takes a free port.
    """
    proxy = Proxy(server_port, links, source_of)
    async with await asyncio.start_server(proxy.accept, "127.0.0.1", port) as server:
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            server.close()
            await proxy.close()


def process_at(port: int, server_port: int, pids: Mapping[str, int]) -> str:
    """Return the name of the process whose end of a connection on this machine has a port; empty if none.

    Args:
        server_port: port at the connection's other end.
        pids: process ids by name.
    """
    inode = _socket_inode(port, server_port)
    for name, pid in pids.items() if inode else ():
        with suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(each.readlink()) == f"socket:[{inode}]":
                        return name
    return ""


def _socket_inode(port: int, server_port: int) -> int:
    """Return the inode of the client's socket of a connection on this machine; 0 if there is none.

    It asks the kernel by netlink (sock_diag(7)): reading /proc/net/tcp takes a thousand times as long.
    """
    address = socket.inet_aton("127.0.0.1") + bytes(12)
    ends = struct.pack("!HH", port, server_port) + address + address
    # Any interface, and no cookie.
    request = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request += ends + struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
    header = struct.pack("=IHHII", _HEADER_BYTES + len(request), _SOCK_DIAG, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.send(header + request)
        answer = netlink.recv(4096)
    (kind,) = struct.unpack_from("=H", answer, 4)
    if kind != _SOCK_DIAG:
        return 0
    inode: int
    (inode,) = struct.unpack_from("=I", answer, _INODE_OFFSET)
    return inode


def _reset(writer: asyncio.StreamWriter) -> None:
    transport: Any = writer.transport
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()
