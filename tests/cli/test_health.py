"""``quire health`` against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from typer.testing import Result

from quire.rpc.server import GrpcServer, grpc_server

Quire = Callable[..., Result]


async def ask(quire: Quire, server: GrpcServer) -> Result:
    return await asyncio.to_thread(quire, "health", server.address)


async def test_the_status_follows_the_server(quire: Quire) -> None:
    async with grpc_server([], registry=CollectorRegistry()) as server:
        result = await ask(quire, server)
        assert (result.exit_code, result.stderr.split(",")[0]) == (1, f"error: {server.address} answers")
        await server.ready()
        result = await ask(quire, server)
        assert (result.exit_code, result.stdout) == (0, "serving\n")
        result = await asyncio.to_thread(quire, "health", "--address", server.address)
        assert (result.exit_code, result.stdout) == (0, "serving\n")
        await server.not_ready()
        assert (await ask(quire, server)).exit_code == 1


def test_where_no_server_listens_the_status_is_1(quire: Quire) -> None:
    result = quire("health", "127.0.0.1:1", "--timeout", "2")
    assert (result.exit_code, result.stderr) == (1, "error: 127.0.0.1:1 does not answer: UNAVAILABLE\n")
