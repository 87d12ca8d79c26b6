"""SIGTERM: what runs is finished where it runs, what comes goes elsewhere, and the process ends with 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from quire.client import AsyncClient
from quire.protos import worker_pb2
from quire.services.local_stack import Child, RunningStack

StartStack = Callable[..., AbstractContextManager[RunningStack]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
WAIT_SECONDS = 20.0
LONG = 400
"""Tokens of an answer that takes longer than it takes the router to see a worker leave."""


async def exit_code(child: Child) -> int | None:
    await asyncio.to_thread(child.process.join, WAIT_SECONDS)
    return child.process.exitcode


async def finish(stream: Any) -> tuple[list[int], Any]:
    """Return the rest of a stream: its tokens and its usage."""
    tokens: list[int] = []
    usage = None
    async for delta in stream:
        tokens += delta.token_ids
        usage = delta.usage or usage
    return tokens, usage


async def num_decode_workers(client: AsyncClient) -> int:
    return (await client.model_info()).num_decode_workers


async def test_a_decode_worker_finishes_its_requests_and_gets_no_more(
    start_stack: StartStack, expected: Any, e2e: Any
) -> None:
    with start_stack("llama", num_decode=2) as stack:
        async with e2e.connected(stack) as (client, workers):
            prompt = e2e.make_prompt(60)
            stream = client.stream(prompt, max_tokens=LONG, **GREEDY)
            first = await anext(stream)
            busy = await _busy_worker(workers)
            stack.workers[busy].process.terminate()
            rest = asyncio.create_task(finish(stream))
            async with asyncio.timeout(WAIT_SECONDS):
                while await num_decode_workers(client) == 2:
                    await asyncio.sleep(0.01)
            other = await client.generate(prompt, max_tokens=64, **GREEDY)
            assert (list(other.token_ids), other.usage.retries) == (expected("llama", prompt), 0)
            tokens, usage = await rest
            tokens = [*first.token_ids, *tokens]
            assert (tokens[:64], len(tokens), usage.retries) == (expected("llama", prompt), LONG, 0)
            assert await exit_code(stack.workers[busy]) == 0


async def _busy_worker(workers: dict[str, Any]) -> str:
    """Return the decode worker that has a request."""
    loads = {name: await stub.GetLoad(worker_pb2.GetLoadRequest()) for name, stub in workers.items()}
    (busy,) = (name for name, load in loads.items() if name.startswith("decode") and load.used_blocks)
    return busy


async def test_a_prefill_worker_leaves_without_a_trace(
    start_stack: StartStack, expected: Any, e2e: Any
) -> None:
    with start_stack("llama", num_prefill=2) as stack:
        async with e2e.connected(stack) as (client, _):
            prompts = [e2e.make_prompt(60, seed) for seed in range(8)]
            answers = [asyncio.create_task(client.generate(p, max_tokens=64, **GREEDY)) for p in prompts]
            stack.workers["prefill-0"].process.terminate()
            for prompt, answer in zip(prompts, answers, strict=True):
                assert list((await answer).token_ids) == expected("llama", prompt)
            assert await exit_code(stack.workers["prefill-0"]) == 0


async def test_a_router_finishes_its_streams(start_stack: StartStack, expected: Any, e2e: Any) -> None:
    with start_stack("llama") as stack:
        async with e2e.connected(stack) as (client, workers):
            prompt = e2e.make_prompt(60)
            stream = client.stream(prompt, max_tokens=64, **GREEDY)
            first = await anext(stream)
            stack.router.process.terminate()
            rest, usage = await finish(stream)
            assert [*first.token_ids, *rest] == expected("llama", prompt)
            assert usage.retries == 0
            assert await exit_code(stack.router) == 0
            await e2e.quiet(workers)
