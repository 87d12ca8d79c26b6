"""What breaks, and what must hold all the same: right tokens or an error, and nothing held afterwards."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from quire.client import AsyncClient
from quire.kvindex.redis_index import RedisIndex, reader_client
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 64}
WAIT_SECONDS = 30.0

NUM_DISCONNECTS = 200


async def test_two_hundred_disconnects_leak_no_blocks(stack: RunningStack) -> None:
    random = Random(5)

    async def leave_early(client: AsyncClient, index: int) -> None:
        prompt = make_prompt(random.randint(1, 200), seed=index % 7)
        kind: dict[str, Any] = ({"temperature": 0.0}, {"n": 4}, {"beam_width": 3})[index % 3]
        stream = client.stream(prompt, ignore_eos=True, max_tokens=64, **kind)
        try:
            async with asyncio.timeout(random.uniform(0.0, 0.3)):
                async for _ in stream:
                    if random.random() < 0.05:
                        break
        except TimeoutError:
            pass
        finally:
            await stream.aclose()

    async with connect(stack) as (client, workers):
        limit = asyncio.Semaphore(16)

        async def one(index: int) -> None:
            async with limit:
                await leave_early(client, index)

        await asyncio.gather(*(one(index) for index in range(NUM_DISCONNECTS)))
        await wait_until_idle(workers)
        assert len((await client.generate(make_prompt(40), **GREEDY)).token_ids) == 64


async def test_requests_are_served_while_redis_is_down_and_after_its_restart(
    start_stack: StartStack, expected: Any
) -> None:
    redis = RedisProcess(password="known")
    try:
        with start_stack("llama", redis_url=redis.url) as stack:
            async with connect(stack) as (client, _):
                prompt = make_prompt(64)
                tokens = expected("llama", prompt)
                assert list((await client.generate(prompt, **GREEDY)).token_ids) == tokens
                redis.stop()
                assert list((await client.generate(prompt, **GREEDY)).token_ids) == tokens
                redis = RedisProcess(port=redis.port, password="known")
                await _wait_for_blocks(redis.url)
                assert list((await client.generate(prompt, **GREEDY)).token_ids) == tokens
    finally:
        redis.stop()


async def _wait_for_blocks(url: str) -> None:
    """Wait until both workers have joined and published their blocks again, by themselves."""
    client = reader_client(url)
    index = RedisIndex(client)
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            while len(await index.members()) < 2 or not [key async for key in client.scan_iter("{q}b*")]:
                await asyncio.sleep(0.05)
    finally:
        await client.aclose()
