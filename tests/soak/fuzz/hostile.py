"""Keep hostile connections open, which flood a router's two ports without a key or a complete request.

python -m tests.soak.fuzz.hostile 127.0.0.1:8500 127.0.0.1:8502 --connections 40 --seconds 20
"""

from __future__ import annotations

import argparse
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_SECONDS = 5.0
PAUSE_SECONDS = 0.05
"""Time before a connection that the server closed is opened again."""
HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 1, 3, 4, 6, 8, 9
UNKNOWN = 0xBE
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PATH = b"/quire.v1.GenerationService/GenerateStream"
_HEADERS = b"\x83\x86\x04%c%s\x41\x01a\x0f\x10\x10application/grpc" % (len(_PATH), _PATH)
_POST = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _frames(kind: int, payload: bytes, stream: int = 0, opening: bytes = b"") -> Iterator[bytes]:
    """Yield what a connection sends that repeats one HTTP/2 frame."""
    yield _PREFACE + frame(SETTINGS, 0, 0) + opening
    while True:
        yield frame(kind, 0, stream, payload) * (1 + 20_000 // (9 + len(payload)))


def _resets() -> Iterator[bytes]:
    """Yield calls that are cancelled at once."""
    yield _PREFACE + frame(SETTINGS, 0, 0)
    for stream in range(1, 1 << 31, 2):
        yield frame(HEADERS, 4, stream, _HEADERS) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8))


def _repeated(opening: bytes, sent: bytes) -> Iterator[bytes]:
    yield opening
    while True:
        yield sent


def grpc_floods() -> dict[str, Iterator[bytes]]:
    """Return what hostile connections to the gRPC port send, by name."""
    headers = frame(HEADERS, 0, 1, _HEADERS)
    return {
        "continuation": _frames(CONTINUATION, b"\0\1a\1b" * 3000, 1, headers),
        "ping": _frames(PING, b"12345678"),
        "unknown": _frames(UNKNOWN, b"a" * 100),
        "window": _frames(WINDOW_UPDATE, struct.pack(">I", 1)),
        "settings": _frames(SETTINGS, struct.pack(">HI", 3, 100)),
        "resets": _resets(),
    }


def http_floods() -> dict[str, Iterator[bytes]]:
    """Return what hostile connections to the HTTP port send, by name."""
    return {
        "chunks": _repeated(_POST % b"/v1/completions", b"1\r\na\r\n" * 5000),
        "unknown path": _repeated(_POST % b"/nope", b"1\r\na\r\n" * 5000),
        "pipelined": _repeated(b"", b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 50),
    }


def flood(number: int, addresses: tuple[str, str], until: float) -> None:
    """Send one kind of flood, chosen by ``number``, and connect again whenever the server has closed.

    Args:
        addresses: of the gRPC and the HTTP port.
        until: time at which to stop, on the monotonic clock.
    """
    while time.monotonic() < until:
        floods = [(addresses[0], sent) for sent in grpc_floods().values()]
        floods += [(addresses[1], sent) for sent in http_floods().values()]
        address, sent = floods[number % len(floods)]
        host, port = address.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout=TIMEOUT_SECONDS) as connection:
                for each in sent:
                    connection.sendall(each)
                    if time.monotonic() > until:
                        return
        except OSError:
            time.sleep(PAUSE_SECONDS)


def main() -> None:
    """Flood both ports until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grpc", help="address of the gRPC port")
    parser.add_argument("http", help="address of the HTTP port")
    parser.add_argument("--connections", type=int, default=40, help="hostile connections (default 40)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of flooding (default 20)")
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    with ThreadPoolExecutor(arguments.connections) as threads:
        for number in range(arguments.connections):
            threads.submit(flood, number, (arguments.grpc, arguments.http), until)


if __name__ == "__main__":
    main()
