"""All servers of quire in one process whose descriptors a test uses up.

``python -m tests.services.server.limited_servers FOLDER`` prints the places of the servers by name as JSON.
Then it answers each line of its input: "fill" uses up all descriptors, "failures" returns how often each
server has failed to accept a connection, "free" gives the descriptors back.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from quire.kvtransfer.transports.pool_socket import PoolSocket, socket_path
from quire.services.router.app import router
from quire.services.router.config import RouterConfig

EPOCH = "limited"


class CountedPoolSocket(PoolSocket):
    def _accept(self) -> None:
        num_before = len(self._connections)
        super()._accept()
        failures["pool"] += len(self._connections) == num_before


failures: Counter[str] = Counter({"http": 0, "metrics": 0, "pool": 0})
_get_request = TCPServer.get_request


def _counted_get_request(self: TCPServer) -> tuple[socket.socket, Any]:
    try:
        return _get_request(self)
    except OSError:
        failures["metrics"] += 1
        raise


def _on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Count what asyncio reports for the HTTP server, which it accepts for."""
    failures["http"] += "accept" in context["message"]


def _fill() -> list[int]:
    """Lower the limit to the descriptors that there are and eight more, and use these up."""
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    filled: list[int] = []
    while True:
        try:
            filled.append(os.dup(0))
        except OSError:
            return filled


def _num_sockets() -> int:
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(link.startswith("socket:") for link in links)


async def _until_clients_have_left(num_sockets: int) -> None:
    """Wait until the servers have closed the connections of earlier clients, which would free descriptors."""
    while _num_sockets() > num_sockets:
        await asyncio.sleep(0.001)


async def _turns() -> None:
    """Let the event loop turn 200 times, and the other threads run for 200 ms: one that spins is seen."""
    for _ in range(200):
        await asyncio.sleep(0.001)


async def main(folder: Path) -> None:
    TCPServer.get_request = _counted_get_request  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_error)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    pool = CountedPoolSocket(folder, EPOCH, os.memfd_create("pool"))
    config = RouterConfig(port=0, http_port=0, metrics_port=0, admin_port=0, cluster_secret=b"s" * 32)
    async with router(config) as running:
        assert running.http is not None
        places = {
            "grpc": running.address,
            "admin": running.admin_address,
            "http": running.http.address,
            "metrics": f"127.0.0.1:{running.metrics_port}",
            "pool": str(socket_path(folder, EPOCH)),
        }
        num_sockets = _num_sockets()
        print(json.dumps(places), flush=True)
        filled: list[int] = []
        while line := (await lines.readline()).decode().strip():
            if line == "fill":
                await _until_clients_have_left(num_sockets)
                filled = _fill()
            elif line == "free":
                while filled:
                    os.close(filled.pop())
            else:
                await _turns()
            print(json.dumps(failures), flush=True)
    pool.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
