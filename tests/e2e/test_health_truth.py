"""What the probes of real processes say while nothing moves, and that slow or idle ones raise no alarm."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client import AsyncClient
from quire.services.local.redis_process import RedisProcess
from tests.testing.forked import Forked
from tests.testing.processes import SLOW_STEPS, scripted_workers
from tests.testing.stacks import begin, make_prompt

SECONDS = 120.0
PROMPT_SECONDS = 3.0
"""Computation of the long prompt."""
LONG_PROMPT, NUM_TOKENS = 400, 200
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
READY = {"status": "ready", "reason": ""}
BLOCKABLE = """
import signal, sys

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
signal.signal(signal.SIGHUP, lambda *_: signal.sigwait([signal.SIGUSR2]))
"""
"""SIGHUP blocks the main thread, with its event loop, until SIGUSR2.

All threads block SIGUSR2, so that it stays pending until the main thread takes it. A handler might never run:
the kernel may give the signal to another thread, and then nothing wakes the main one.
"""
WORKER = (
    BLOCKABLE
    + SLOW_STEPS
    + """
settings["redis_url"], prompt_length, prompt_seconds = sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def begin():
    signal.signal(signal.SIGUSR1, lambda *_: may_step.clear())
    signal.signal(signal.SIGWINCH, lambda *_: may_step.set())
"""
)
ROUTER = (
    BLOCKABLE
    + """
import asyncio, json
from quire.services.router.app import run_router
from quire.services.router.config import RouterConfig

def on_ready(running):
    print(json.dumps([running.address, running.metrics_port]), flush=True)

# On a busy machine, a worker takes long to start.
config = RouterConfig(
    port=0, redis_url=sys.argv[1], poll_seconds=0.2, worker_wait_seconds=120.0, log_level="error"
)
asyncio.run(run_router(config, on_ready))
"""
)


class Probed:
    """A process, and what its probes answer."""

    def __init__(self, process: Forked, address: str, metrics_port: int) -> None:
        self.process, self.address, self._metrics_port = process, address, metrics_port

    async def answer(self, path: str) -> tuple[int, dict[str, str]]:
        def read() -> tuple[int, dict[str, str]]:
            try:
                with urlopen(f"http://127.0.0.1:{self._metrics_port}{path}", timeout=SECONDS) as answer:
                    return answer.status, json.load(answer)
            except HTTPError as error:
                return error.code, json.load(error)

        return await asyncio.to_thread(read)

    async def until(self, status: str, word: str = "") -> None:
        """Wait until ``/ready`` tells a status and a reason that has a word."""
        code = 200 if status == "ready" else 503
        while True:
            found, told = await self.answer("/ready")
            if (found, told["status"]) == (code, status) and word in told["reason"]:
                break
            await asyncio.sleep(0.02)

    async def until_grpc(self, status: str, word: str = "") -> None:
        """Wait until gRPC's health service tells a status and a reason that has a word."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            while True:
                call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                told = dict(await call.trailing_metadata())
                is_serving = (await call).status == health_pb2.HealthCheckResponse.SERVING
                assert is_serving == (told["quire-status"] == "ready")
                if told["quire-status"] == status and word in told["quire-reason"]:
                    return
                await asyncio.sleep(0.02)

    async def tells(self, status: str, word: str = "") -> None:
        """Wait until the probes of both kinds tell the same; the process stays alive."""
        await self.until(status, word)
        await self.until_grpc(status, word)
        assert await self.answer("/health") == (200, {"status": "alive", "reason": ""})


@contextmanager
def worker_process(model: Path, redis: RedisProcess) -> Iterator[Probed]:
    arguments = (redis.url, LONG_PROMPT, PROMPT_SECONDS)
    with scripted_workers(WORKER, model, *arguments) as workers:
        (worker,) = workers
        yield Probed(worker.process, worker.address, worker.metrics_port)


@contextmanager
def running_router(redis: RedisProcess) -> Iterator[Probed]:
    with closing(Forked(ROUTER, [redis.url], has_pipes=True)) as process:
        yield Probed(process, *json.loads(process.stdout.readline()))


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[tuple[RedisProcess, Probed, Probed]]:
    """A Redis, a router and its only worker."""
    with RedisProcess() as redis, worker_process(model, redis) as worker, running_router(redis) as router:
        yield redis, router, worker


@asynccontextmanager
async def answering(router: Probed) -> AsyncIterator[asyncio.Task[tuple[list[int], int]]]:
    """Yield a request that has got its first tokens; afterwards, expect that it gets all."""
    async with AsyncClient(router.address) as client:
        answer = await begin(client, make_prompt(40), **OPTIONS)
        yield answer
        tokens, _ = await answer
        assert len(tokens) == NUM_TOKENS


async def test_a_step_that_does_not_end_stalls_worker_and_router(stack: Any) -> None:
    _, router, worker = stack
    async with asyncio.timeout(SECONDS), answering(router):
        worker.process.send_signal(signal.SIGUSR1)
        await worker.tells("stalled", "step")
        await router.tells("stalled", "1 stalled; 1 request waits")
        worker.process.send_signal(signal.SIGWINCH)
        await worker.tells("ready")
        await router.tells("ready")


async def test_a_worker_that_is_stopped_stalls_the_router(stack: Any) -> None:
    _, router, worker = stack
    async with asyncio.timeout(SECONDS), answering(router):
        worker.process.send_signal(signal.SIGSTOP)
        await router.tells("stalled", "1 request waits")
        worker.process.send_signal(signal.SIGCONT)
        await router.tells("ready")
        await worker.tells("ready")


@pytest.mark.parametrize("name", ["router", "worker"])
async def test_an_event_loop_that_is_blocked_is_neither_alive_nor_ready(stack: Any, name: str) -> None:
    process = dict(zip(("router", "worker"), stack[1:], strict=True))[name]
    async with asyncio.timeout(SECONDS):
        process.process.send_signal(signal.SIGHUP)
        await process.until("stalled", "event loop")
        code, told = await process.answer("/health")
        assert (code, told["status"]) == (503, "stalled")
        process.process.send_signal(signal.SIGUSR2)
        await process.tells("ready")
        await stack[1].tells("ready")


async def test_a_long_prompt_and_an_idle_server_are_no_stall(stack: Any) -> None:
    _, router, worker = stack
    async with asyncio.timeout(SECONDS), AsyncClient(router.address) as client:
        told: dict[str, list[int]] = {router.address: [], worker.address: []}

        async def watch(address: str) -> None:
            async with grpc.aio.insecure_channel(address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                async for change in stub.Watch(health_pb2.HealthCheckRequest()):
                    told[address].append(change.status)

        watches = [asyncio.create_task(watch(address)) for address in told]
        await client.generate(make_prompt(LONG_PROMPT), **OPTIONS | {"max_tokens": 8})
        # Reports of the idle worker, and more looks at the health than it takes to see a stall.
        await asyncio.sleep(PROMPT_SECONDS)
        for each in watches:
            each.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        assert list(told.values()) == [[health_pb2.HealthCheckResponse.SERVING]] * 2


async def test_the_death_of_the_last_decode_worker_stalls_the_router_until_another_comes(
    stack: Any, model: Path
) -> None:
    """This comes last, since it ends the worker."""
    redis, router, worker = stack
    async with asyncio.timeout(SECONDS), answering(router) as answer:
        worker.process.kill()
        await router.tells("stalled", "1 request waits")
        with worker_process(model, redis) as another:
            await another.tells("ready")
            await router.tells("ready")
            await answer
