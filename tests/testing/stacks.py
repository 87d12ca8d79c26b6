"""Real stacks of router, workers and Redis: processes, prompts, connections, and waits for what happens."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from random import Random
from typing import Any
from urllib.request import urlopen

import grpc
import openai
from prometheus_client.parser import text_string_to_metric_families

from quire.client import AsyncClient
from quire.models.notes import Example
from quire.protos import worker_pb2 as pb
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.services.local.child_processes import Child
from quire.services.local.stack import RunningStack
from tests.testing.until import until

StartStack = Callable[..., AbstractContextManager[RunningStack]]
IDLE_SECONDS = 20.0
WAIT_SECONDS = 60.0
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return Random(seed * 1000 + length).choices(range(2, 258), k=length)


@asynccontextmanager
async def connect(stack: RunningStack) -> AsyncIterator[tuple[AsyncClient, dict[str, WorkerServiceStub]]]:
    """Yield a client of the router and a stub of each worker; then wait until those that run are idle."""
    async with AsyncClient(stack.address) as client:
        channels = {name: grpc.aio.insecure_channel(w.address) for name, w in stack.ready.items()}
        workers = {name: WorkerServiceStub(stack.peer(name, channel)) for name, channel in channels.items()}
        try:
            yield client, workers
            for name, worker in workers.items():
                await _until_idle_or_ended(name, worker, stack.workers[name])
        finally:
            for channel in channels.values():
                await channel.close(None)


async def _until_idle_or_ended(name: str, worker: WorkerServiceStub, child: Child) -> None:
    try:
        await wait_until_idle({name: worker})
    except grpc.aio.AioRpcError:  # only a worker that ends may give no answer
        await until(lambda: not child.process.is_alive())


def openai_client(stack: RunningStack) -> openai.OpenAI:
    """Return OpenAI's client of a stack, which tries nothing again."""
    return openai.OpenAI(base_url=f"http://{stack.http_address}/v1", api_key="none", max_retries=0)


async def answers_to(client: AsyncClient, examples: Iterable[Example], max_tokens: int = 16) -> list[str]:
    """Return the demo model's greedy answers, whose blocks must have been shipped; ask for 16 at a time."""
    limit = asyncio.Semaphore(16)

    async def ask(example: Example) -> str:
        async with limit:
            messages: Any = list(example.messages)
            answer = await client.chat(messages, temperature=0.0, max_tokens=max_tokens)
            assert answer.usage.blocks_shipped > 0
            return str(answer.text)

    return await asyncio.gather(*map(ask, examples))


async def kill_busy_worker(
    stack: RunningStack, workers: dict[str, Any], how: signal.Signals = signal.SIGKILL
) -> None:
    """Kill the decode worker, of two, that has a request; with SIGTERM it drains first."""
    for name in ("decode-0", "decode-1"):
        if (await workers[name].GetLoad(pb.GetLoadRequest())).used_blocks:
            pid = stack.workers[name].process.pid
            assert pid is not None
            os.kill(pid, how)
            return  # the other worker may have taken the request by now


def metric(stack: RunningStack, process: str, name: str, **labels: str) -> float:
    """Return the sum of a metric of a worker, or of "router", over its samples with these labels."""
    of_process = stack.config.router if process == "router" else stack.ready[process]
    with urlopen(f"http://127.0.0.1:{of_process.metrics_port}/metrics", timeout=10) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = (each for family in families for each in family.samples if each.name == name)
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


async def until_decode_workers(client: AsyncClient, count: int) -> None:
    """Wait until a router knows so many decode workers; fail after a minute."""
    async with asyncio.timeout(WAIT_SECONDS):
        while (await client.model_info()).num_decode_workers != count:
            await asyncio.sleep(0.01)


async def begin(
    client: AsyncClient, prompt: list[int], **options: Any
) -> asyncio.Task[tuple[list[int], int]]:
    """Begin a stream, and wait for its first tokens; the task returns all of them and the retries."""
    stream = client.stream(prompt, **options)
    first = list((await anext(stream)).token_ids)

    async def whole() -> tuple[list[int], int]:
        tokens, num_retries = await rest_of(stream)
        return first + tokens, num_retries

    return asyncio.create_task(whole())


async def check_answers(client: AsyncClient, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Ask for the greedy answers to some prompts at once; no request may be tried again."""
    options = {"max_tokens": len(expected[0]), **GREEDY}
    answers = await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))
    assert [(list(each.token_ids), each.usage.retries) for each in answers] == [
        (each, 0) for each in expected
    ]


async def rest_of(stream: Any) -> tuple[list[int], int]:
    """Return the tokens of the rest of a stream, and how often it was tried again."""
    tokens: list[int] = []
    async for delta in stream:
        tokens += delta.token_ids
    return tokens, delta.usage.retries


async def wait_until_idle(workers: dict[str, WorkerServiceStub]) -> dict[str, pb.GetLoadResponse]:
    """Wait until no worker's blocks are used or pinned, and return the loads; fail after 20 seconds."""
    async with asyncio.timeout(IDLE_SECONDS):
        while True:
            loads = {name: await stub.GetLoad(pb.GetLoadRequest()) for name, stub in workers.items()}
            if not any(load.used_blocks or load.pinned_blocks for load in loads.values()):
                return loads
            await asyncio.sleep(0.02)
