"""SIGTERM: what runs is finished where it runs, what comes goes elsewhere, and the process ends with 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.client import AsyncClient
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack
from tests.testing.processes import worker_process
from tests.testing.stacks import (
    GREEDY,
    StartStack,
    begin,
    check_answers,
    connect,
    make_prompt,
    until_decode_workers,
    wait_until_idle,
)

WAIT_SECONDS = 60.0
LONG = 400
"""Tokens of an answer that goes on while its worker stops."""


async def test_no_client_notices_that_a_worker_and_then_the_router_is_stopped(
    start_stack: StartStack, tiny_model: Callable[[str], Path], expected: Any, monkeypatch: Any
) -> None:
    """Load goes to two decode workers, both have a long answer under way, and one gets SIGTERM.

    At last the router gets it, and ends its own stream.
    """
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    prompts = [make_prompt(60, seed) for seed in range(2)]
    beginnings = [expected("llama", prompt) for prompt in prompts]
    with (
        RedisProcess() as redis,
        start_stack("llama", redis_url=redis.url) as stack,
        worker_process(tiny_model("llama"), redis.worker_url, "--grace-period", "120") as worker,
    ):
        async with connect(stack) as (client, workers):
            await until_decode_workers(client, 2)
            long = [await begin(client, prompt, max_tokens=LONG, **GREEDY) for prompt in prompts]
            worker.terminate()
            while worker.poll() is None:
                await check_answers(client, prompts, beginnings)
            assert worker.returncode == 0
            for beginning, answer in zip(beginnings, long, strict=True):
                tokens, num_retries = await answer
                assert (tokens[:64], len(tokens), num_retries) == (beginning, LONG, 0)
            await until_decode_workers(client, 1)
            await wait_until_idle(workers)
            await finish_streams_of_a_router(stack, client, beginnings[0])


async def finish_streams_of_a_router(stack: RunningStack, client: AsyncClient, expected: list[int]) -> None:
    """Stop the router while an answer is under way; it must end as usual."""
    process = stack.routers["router"].process
    answer = await begin(client, make_prompt(60), max_tokens=64, **GREEDY)
    process.terminate()
    assert await answer == (expected, 0)
    await asyncio.to_thread(process.join, WAIT_SECONDS)
    assert process.exitcode == 0
