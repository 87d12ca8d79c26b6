"""SIGTERM: what runs is finished where it runs, what comes goes elsewhere, and the process ends with 0."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.client import AsyncClient
from quire.services.local.redis_process import RedisProcess
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
WAIT_SECONDS = 60.0
LONG = 400
"""Tokens of an answer that goes on while its worker stops."""

QUIRE = [sys.executable, "-c", "from quire.cli.main import main; main()"]


@contextmanager
def decode_worker(model: Path, redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command that containers run."""
    settings = ["--dtype", "float32", "--num-blocks", "2048", "--log-level", "error", "--grace-period", "120"]
    with subprocess.Popen([*QUIRE, "decode", str(model), "--redis-url", redis_url, *settings]) as process:
        try:
            yield process
        finally:
            process.kill()


async def until_decode_workers(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while (await client.model_info()).num_decode_workers != count:
            await asyncio.sleep(0.01)


async def finish(stream: Any) -> tuple[list[int], int]:
    """Return the tokens of the rest of a stream, and how often it was tried again."""
    tokens: list[int] = []
    async for delta in stream:
        tokens += delta.token_ids
    return tokens, delta.usage.retries


async def test_no_client_notices_that_a_worker_is_stopped(
    start_stack: StartStack, tiny_model: Callable[[str], Path], expected: Any, monkeypatch: Any
) -> None:
    """Load goes to two decode workers, both have a long answer under way, and one gets SIGTERM."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    prompts = [make_prompt(60, seed) for seed in range(2)]
    with (
        RedisProcess() as redis,
        start_stack("llama", redis_url=redis.url) as stack,
        decode_worker(tiny_model("llama"), redis.worker_url) as worker,
    ):
        async with connect(stack) as (client, workers):
            await until_decode_workers(client, 2)
            long = [client.stream(prompt, max_tokens=LONG, **GREEDY) for prompt in prompts]
            firsts = [list((await anext(stream)).token_ids) for stream in long]
            rests = [asyncio.create_task(finish(stream)) for stream in long]
            worker.terminate()
            while worker.poll() is None:
                answers = [client.generate(prompt, max_tokens=64, **GREEDY) for prompt in prompts]
                for prompt, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
                    assert list(answer.token_ids) == expected("llama", prompt)
                    assert answer.usage.retries == 0
            assert worker.returncode == 0
            for prompt, first, rest in zip(prompts, firsts, rests, strict=True):
                tokens, num_retries = await rest
                assert ([*first, *tokens][:64], num_retries) == (expected("llama", prompt), 0)
                assert len(first) + len(tokens) == LONG
            await until_decode_workers(client, 1)
            await wait_until_idle(workers)


async def test_a_router_finishes_its_streams(start_stack: StartStack, expected: Any) -> None:
    with start_stack("llama") as stack:
        async with connect(stack) as (client, workers):
            prompt = make_prompt(60)
            stream = client.stream(prompt, max_tokens=64, **GREEDY)
            first = list((await anext(stream)).token_ids)
            stack.routers["router"].process.terminate()
            tokens, num_retries = await finish(stream)
            assert ([*first, *tokens], num_retries) == (expected("llama", prompt), 0)
            await asyncio.to_thread(stack.routers["router"].process.join, WAIT_SECONDS)
            assert stack.routers["router"].process.exitcode == 0
            await wait_until_idle(workers)
