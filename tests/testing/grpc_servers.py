"""gRPC servers on free ports of the loopback, without what quire's own servers add."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

PLACE = "127.0.0.1:0"
Served = tuple[Callable[[Any, Any], object], Any]
"""The function that adds a servicer to a server, and the servicer."""


@contextmanager
def threaded_server(*served: Served, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Serve with threads, and yield the address."""
    with ThreadPoolExecutor(16) as executor:
        server = grpc.server(executor)
        for add, servicer in served:
            add(servicer, server)
        port = server.add_secure_port(PLACE, credentials) if credentials else server.add_insecure_port(PLACE)
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(10)


@asynccontextmanager
async def asyncio_server(*served: Served) -> AsyncIterator[str]:
    """Serve on the event loop, and yield the address."""
    server = grpc.aio.server()
    for add, servicer in served:
        add(servicer, server)
    port = server.add_insecure_port(PLACE)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
