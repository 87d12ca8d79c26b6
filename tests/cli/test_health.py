"""``quire health`` against a real server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from typer.testing import Result

from quire.rpc.health import Health
from quire.rpc.server import GrpcServer, grpc_server
from tests.testing.grpc_servers import asyncio_server

Quire = Callable[..., Result]


async def ask(quire: Quire, server: GrpcServer) -> Result:
    return await asyncio.to_thread(quire, "health", server.address)


async def test_the_status_follows_the_server(quire: Quire) -> None:
    async with grpc_server([], registry=CollectorRegistry()) as server:
        result = await ask(quire, server)
        assert (result.exit_code, result.stderr) == (
            1,
            f"error: {server.address} is not ready: it is starting\n",
        )
        await server.ready()
        result = await ask(quire, server)
        assert (result.exit_code, result.stdout) == (0, "ready\n")
        for options in ((), ("--timeout", "inf")):
            result = await asyncio.to_thread(quire, "health", "--address", server.address, *options)
            assert (result.exit_code, result.stdout) == (0, "ready\n")
        await server.report(Health("stalled", "3 requests wait"))
        result = await ask(quire, server)
        assert (result.exit_code, result.stderr) == (
            1,
            f"error: {server.address} is stalled: 3 requests wait\n",
        )


async def test_proxies_are_not_used(quire: Quire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with grpc_server([], registry=CollectorRegistry()) as server:
        await server.ready()
        assert (await ask(quire, server)).stdout == "ready\n"


async def test_a_server_that_gives_no_reason_is_not_ready(quire: Quire) -> None:
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    async with asyncio_server((health_pb2_grpc.add_HealthServicer_to_server, servicer)) as address:
        result = await asyncio.to_thread(quire, "health", address)
    assert (result.exit_code, result.stderr) == (1, f"error: {address} is not ready: it gives no reason\n")


def test_a_process_that_is_stopped_is_said_to_be_stuck(quire: Quire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        result = quire("health", f"127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.2")
    assert result.exit_code == 1
    assert "has not answered within 0.2 s: it is stopped, stuck or unreachable" in result.stderr


def test_where_no_server_listens_the_status_is_1(quire: Quire) -> None:
    result = quire("health", "127.0.0.1:1", "--timeout", "2")
    assert (result.exit_code, result.stderr) == (1, "error: 127.0.0.1:1 does not answer: UNAVAILABLE\n")
