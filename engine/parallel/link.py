"""A connection between rank 0 and a rank on another machine, and how the two prove who they are.

Both ends know the cluster's secret and prove it with an HMAC of two random numbers, one of each end, so that
nothing that was recorded proves anything again. With certificates, the connection is TLS besides.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NoReturn

from quire.engine.block_memory import Buffer
from quire.engine.parallel.collectives import RanksError

HANDSHAKE_SECONDS = 5.0
TOKEN_BYTES = 16
_NONCE_BYTES = 32
_FRAME = struct.Struct("!BQ")
_LONGEST_TEXT = 1 << 16
_JOINED_BYTES = 1 << 16
"""Shorter frames go out in one piece, since a second call costs more than a copy."""


class Purpose(IntEnum):
    """What a connection carries: steps and their sums, or blocks."""

    STEPS = 0
    BLOCKS = 1


class FrameKind(IntEnum):
    """What a frame carries."""

    ERROR = 0
    """Why the sender has failed."""
    SETTINGS = 1
    LOADED = 2
    POOL = 3
    STEP = 4
    SUM = 5
    LOGITS = 6
    END = 7
    PING = 8
    READ = 9
    WRITE = 10
    COPY = 11
    DONE = 12


@dataclass(frozen=True)
class Trust:
    """How the two ends of a link recognise each other.

    Attributes:
        secret: the cluster's secret; may be empty between processes of one machine.
        server: TLS of the end that listens; None means plain TCP.
        client: TLS of the end that connects.
        name: the name that the certificate of the listening end must have.
    """

    secret: bytes = field(default=b"", repr=False)
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    name: str = ""


class Link:
    """Frames over one connection. At each end, one thread at a time uses it; any thread may close it."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._connection = connection
        self.peer = peer

    def set_limit(self, seconds: float | None) -> None:
        """Let a call fail that moves no byte for this long; None means no limit."""
        # Setting it takes a system call, and callers set the same limit in each step.
        if self._connection.gettimeout() != seconds:
            self._connection.settimeout(seconds)

    @property
    def has_ended(self) -> bool:
        """Whether the other end has closed the connection, and nothing is left to receive."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            # Of TLS, this sees the encrypted bytes.
            return not socket.socket.recv(self._connection, 1, socket.MSG_PEEK)
        except OSError:
            return True

    def send(self, kind: FrameKind, *parts: Buffer) -> None:
        """Send a frame.

        Raises:
            RanksError: the other end is gone.
        """
        header = _FRAME.pack(kind, sum(len(each) for each in parts))
        try:
            if sum(len(each) for each in parts) < _JOINED_BYTES:
                self._connection.sendall(b"".join((header, *parts)))
                return
            self._connection.sendall(header)
            for each in parts:
                self._connection.sendall(each)
        except OSError as error:
            raise RanksError(f"{self.peer} is gone: {error}") from error

    def receive(self, *expected: FrameKind) -> tuple[FrameKind, bytearray]:
        """Return the next frame, which must be of one of some kinds.

        Raises:
            RanksError: the other end is gone, has failed, or has sent something else.
        """
        kind, size = self._receive_header()
        if kind not in expected:
            self._raise_unexpected(kind, size)
        return FrameKind(kind), self._read(size)

    def receive_into(self, kind: FrameKind, *targets: memoryview) -> None:
        """Receive a frame that fills some pieces of memory exactly.

        Raises:
            RanksError: the other end is gone, has failed, or has sent something else.
        """
        found, size = self._receive_header()
        if (found, size) != (kind, sum(map(len, targets))):
            self._raise_unexpected(found, size)
        for each in targets:
            self._fill(each)

    def close(self) -> None:
        """Close the connection; a call that another thread makes with it fails."""
        # TLS's own farewell would wait for the other end.
        _shut_down(self._connection)
        self._connection.close()

    def _receive_header(self) -> tuple[int, int]:
        kind, size = _FRAME.unpack(self._read(_FRAME.size))
        return kind, size

    def _raise_unexpected(self, kind: int, size: int) -> NoReturn:
        if kind == FrameKind.ERROR:
            text = self._read(min(size, _LONGEST_TEXT)).decode(errors="replace")
            raise RanksError(f"{self.peer}: {text}")
        if kind == FrameKind.END:
            raise RanksError(f"{self.peer} has ended")
        raise RanksError(f"{self.peer} has sent {size} bytes of kind {kind}, which do not belong here")

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        self._fill(memoryview(data))
        return data

    def _fill(self, target: memoryview) -> None:
        try:
            while target:
                num_bytes = self._connection.recv_into(target)
                if not num_bytes:
                    raise RanksError(f"{self.peer} has closed the connection")
                target = target[num_bytes:]
        except TimeoutError as error:
            seconds = self._connection.gettimeout() or 0.0
            raise RanksError(f"{self.peer} has not answered for {seconds:.0f} s") from error
        except OSError as error:
            raise RanksError(f"{self.peer} is gone: {error}") from error


def accept(connection: socket.socket, trust: Trust) -> tuple[Purpose, bytes, Link]:
    """Make a link of a connection that the listening end has accepted.

    Returns what it is for, the token that tells a rank from others, and the link.

    Raises:
        OSError: the other end does not prove that it belongs to the cluster.
    """
    try:
        _prepare(connection)
        if trust.server is not None:
            connection = trust.server.wrap_socket(connection, server_side=True)
        link = Link(connection, _name_of(connection))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        hello = bytes(link._read(1 + TOKEN_BYTES + _NONCE_BYTES))
        proof = bytes(link._read(hashlib.sha256().digest_size))
        if not hmac.compare_digest(proof, _proof(trust, b"rank", nonce + hello)):
            raise OSError("it does not know the cluster's secret")
        connection.sendall(_proof(trust, b"worker", nonce + hello))
        return Purpose(hello[0]), hello[1 : 1 + TOKEN_BYTES], link
    except (RanksError, ValueError) as error:
        connection.close()
        raise OSError(str(error)) from error
    except BaseException:
        connection.close()
        raise


def connect(address: tuple[str, int], purpose: Purpose, token: bytes, trust: Trust) -> Link:
    """Connect to the listening end.

    Raises:
        RanksError: the other end does not belong to the cluster, or does not take this end for a part of it.
        OSError: no process listens there.
    """
    connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        _prepare(connection)
        if trust.client is not None:
            connection = trust.client.wrap_socket(connection, server_hostname=trust.name)
        link = Link(connection, f"the worker at {address[0]}:{address[1]}")
        nonce = bytes(link._read(_NONCE_BYTES))
        hello = bytes([purpose]) + token + secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(hello + _proof(trust, b"rank", nonce + hello))
        if not hmac.compare_digest(
            bytes(link._read(hashlib.sha256().digest_size)), _proof(trust, b"worker", nonce + hello)
        ):
            raise RanksError(f"{link.peer} does not know the cluster's secret")
        link.set_limit(None)
        return link
    except BaseException:
        connection.close()
        raise


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(HANDSHAKE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A machine that loses its power says nothing. The system asks it now and then, even while this end waits.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _proof(trust: Trust, role: bytes, said: bytes) -> bytes:
    return hmac.digest(trust.secret, b"quire rank link: " + role + said, hashlib.sha256)


def _name_of(connection: socket.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"the rank at {host}:{port}"


def _shut_down(connection: socket.socket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:  # the other end has closed it
        return
