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
    connect,
    make_prompt,
    rest_of,
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
    with (
        RedisProcess() as redis,
        start_stack("llama", redis_url=redis.url) as stack,
        worker_process(tiny_model("llama"), redis.worker_url, "--grace-period", "120") as worker,
    ):
        async with connect(stack) as (client, workers):
            await until_decode_workers(client, 2)
            long = [client.stream(prompt, max_tokens=LONG, **GREEDY) for prompt in prompts]
            firsts = [list((await anext(stream)).token_ids) for stream in long]
            rests = [asyncio.create_task(rest_of(stream)) for stream in long]
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
            await finish_streams_of_a_router(stack, client, expected("llama", prompts[0]))


async def finish_streams_of_a_router(stack: RunningStack, client: AsyncClient, expected: list[int]) -> None:
    """Stop the router while an answer is under way; it must end as usual."""
    process = stack.routers["router"].process
    stream = client.stream(make_prompt(60), max_tokens=64, **GREEDY)
    first = list((await anext(stream)).token_ids)
    process.terminate()
    tokens, num_retries = await rest_of(stream)
    assert ([*first, *tokens], num_retries) == (expected, 0)
    await asyncio.to_thread(process.join, WAIT_SECONDS)
    assert process.exitcode == 0
