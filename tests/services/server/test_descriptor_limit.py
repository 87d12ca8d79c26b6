"""Servers whose process has no descriptor left: they neither spin nor end, and serve again afterwards."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

pytestmark = pytest.mark.slow

WAIT_SECONDS = 20.0
NUM_CLIENTS = 3


class Servers:
    """The process with the servers; see ``limited_servers``."""

    def __init__(self, folder: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.server.limited_servers", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.places = self._answer()

    def ask(self, command: str) -> dict[str, int]:
        """Send a command; return how often each server has failed to accept."""
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return {name: int(number) for name, number in self._answer().items()}

    def _answer(self) -> dict[str, str]:
        assert self.process.stdout is not None
        answer: dict[str, str] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        running = Servers(folder)
        with running.process as process:
            yield running
            assert process.poll() is None, "the process has ended"
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(WAIT_SECONDS) == 0


def connect(name: str, place: str) -> socket.socket:
    """Return a connection that the server has not accepted yet, with a request on its way."""
    if name == "pool":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place)
    else:
        host, _, port = place.rpartition(":")
        connection = socket.create_connection((host, int(port)))
        path = {"http": "/health", "metrics": "/metrics"}[name]
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    connection.settimeout(WAIT_SECONDS)
    return connection


def answer(name: str, connection: socket.socket) -> bytes:
    if name == "pool":
        message, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
        for each in descriptors:
            socket.close(each)
        return message
    return connection.recv(16)


@pytest.mark.parametrize("name", ["http", "metrics", "pool"])
def test_a_server_without_descriptors_does_not_spin_and_serves_again(servers: Servers, name: str) -> None:
    place, expected = servers.places[name], b"limited" if name == "pool" else b"HTTP/1."
    with connect(name, place) as connection:
        assert answer(name, connection).startswith(expected)
    before = servers.ask("fill")
    with ExitStack() as stack:
        waiting = [stack.enter_context(connect(name, place)) for _ in range(NUM_CLIENTS)]
        # Each question lets the event loop turn 200 times, and the other threads run for 200 ms.
        num_failures = [servers.ask("failures")[name] - before[name] for _ in range(3)]
        assert num_failures[-1] > 0
        assert num_failures[-1] - num_failures[-2] <= 20
        servers.ask("free")
        for each in waiting:
            assert answer(name, each).startswith(expected)


@pytest.mark.parametrize("name", ["grpc", "admin"])
def test_a_grpc_server_without_descriptors_serves_again(servers: Servers, name: str) -> None:
    request = health_pb2.HealthCheckRequest()
    servers.ask("fill")
    with grpc.insecure_channel(servers.places[name]) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check.future(
            request, timeout=WAIT_SECONDS, wait_for_ready=True
        )
        for _ in range(3):
            servers.ask("failures")
        assert not check.done()
        servers.ask("free")
        assert check.result().status in (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
