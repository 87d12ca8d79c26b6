"""The HTTP port of every process: its metrics, and its answers to health probes."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError

import pytest
from prometheus_client import CollectorRegistry, Counter

from quire.rpc.health import Health
from quire.rpc.server import GrpcServer, bind_problem, grpc_server
from quire.services.server import metrics_server as metrics_server_module
from quire.services.server.loop_lag import LoopLagMetrics, loop_lag_observed
from quire.services.server.metrics_server import Probes, metrics_server
from tests.testing.commands import run_command

SECONDS = 10.0
STALLED = Health("stalled", "2 requests wait")
READY = Path(__file__).parents[3] / "deploy" / "ready.sh"


class Process:
    """What the HTTP port of one process answers."""

    def __init__(
        self, server: GrpcServer, lag: LoopLagMetrics, port: int, registry: CollectorRegistry
    ) -> None:
        self.server, self.lag, self.port, self.registry = server, lag, port, registry

    def answer(self, path: str) -> tuple[int, dict[str, str]]:
        """Return the status and the body of a probe's answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=SECONDS) as answer:
                return int(answer.status), json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)

    def status(self, path: str) -> int:
        return self.answer(path)[0]

    def statuses(self) -> tuple[int, int, float | None]:
        """Return the answers of /health and /ready, and the metric."""
        return self.status("/health"), self.status("/ready"), self.registry.get_sample_value("quire_ready")

    def script(self) -> tuple[int, str]:
        """Return the exit status of the images' health check, and what it prints."""
        environment = {**os.environ, "QUIRE_METRICS_PORT": str(self.port)}
        done = subprocess.run([READY], env=environment, timeout=SECONDS, check=False, stdout=subprocess.PIPE)
        return done.returncode, done.stdout.decode()


def until(process: Process, answer: tuple[int, int, float]) -> None:
    end = time.monotonic() + SECONDS
    while process.statuses() != answer:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    registry = CollectorRegistry()
    async with (
        grpc_server([], registry=registry) as server,
        loop_lag_observed(LoopLagMetrics(registry)) as lag,
    ):
        with metrics_server(registry, Probes(server, lag)) as port:
            yield Process(server, lag, port, registry)


async def test_metrics_are_served_from_the_given_registry(process: Process) -> None:
    Counter("tests_total", "Tests.", registry=process.registry).inc()

    def read() -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=SECONDS) as answer:
            return bytes(answer.read())

    assert b"tests_total 1.0" in await asyncio.to_thread(read)
    taken = pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{process.port}")
    with taken, metrics_server(CollectorRegistry(), Probes(process.server, process.lag), port=process.port):
        pass


@pytest.mark.skipif(bind_problem("[::1]", 0) is not None, reason="needs an IPv6 loopback address")
async def test_it_listens_on_an_ipv6_address(process: Process) -> None:
    probes = Probes(process.server, process.lag)
    with (
        metrics_server(CollectorRegistry(), probes, host="[::1]") as port,
        socket.create_connection(("::1", port), SECONDS),
    ):
        pass


async def test_a_silent_connection_is_ended(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server_module._QuietHandler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", process.port), SECONDS) as silent:
        assert await asyncio.to_thread(silent.recv, 1) == b""


async def test_ready_follows_the_server_and_health_does_not(process: Process) -> None:
    for change, answer in (
        (None, (200, 503, 0.0)),
        (process.server.ready, (200, 200, 1.0)),
        (partial(process.server.report, STALLED), (200, 503, 0.0)),
        (process.server.ready, (200, 200, 1.0)),
        (process.server.stop, (200, 503, 0.0)),
        (process.server.ready, (200, 503, 0.0)),
    ):
        if change is not None:
            await change()
        assert await asyncio.to_thread(process.statuses) == answer


async def test_the_probes_say_why(process: Process) -> None:
    async def answer(path: str) -> tuple[int, dict[str, str]]:
        return await asyncio.to_thread(process.answer, path)

    assert await answer("/ready") == (503, {"status": "not_ready", "reason": "it is starting"})
    await process.server.report(STALLED)
    assert await answer("/ready") == (503, {"status": "stalled", "reason": "2 requests wait"})
    assert await answer("/health") == (200, {"status": "alive", "reason": ""})
    await process.server.ready()
    assert await answer("/ready") == (200, {"status": "ready", "reason": ""})
    await process.server.stop()
    await process.server.ready()
    assert await answer("/ready") == (503, {"status": "not_ready", "reason": "it is stopping"})


async def test_a_stuck_event_loop_is_neither_live_nor_ready(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server_module, "STUCK_SECONDS", 0.05)
    await process.server.ready()
    is_over, told = threading.Event(), list[dict[str, str]]()

    def ask() -> None:
        until(process, (503, 503, 0.0))
        for path in ("/health", "/ready"):
            told.append(process.answer(path)[1])
        is_over.set()

    asking = asyncio.get_running_loop().run_in_executor(None, ask)
    # The event loop runs nothing until the probes have been answered.
    assert is_over.wait(SECONDS)
    await asking
    assert all(each["status"] == "stalled" and "event loop" in each["reason"] for each in told)
    await asyncio.to_thread(until, process, (200, 200, 1.0))


async def test_the_health_check_of_the_images_follows_ready(process: Process) -> None:
    await process.server.report(STALLED)
    assert await asyncio.to_thread(process.script) == (1, f"{json.dumps(STALLED._asdict())}\n")
    await process.server.ready()
    assert await asyncio.to_thread(process.script) == (0, "")


def test_the_health_check_of_the_images_fails_where_nothing_listens() -> None:
    run_command(READY, status=1, variables={"QUIRE_METRICS_PORT": "1"}, timeout=SECONDS)
