"""A worker changes its role while it serves: the same tokens, the same cache, and all routers know."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from quire.client import AsyncClient, Unsupported
from quire.client.admin import AdminClient
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
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
from tests.testing.until import until

WAIT_SECONDS = 30.0
LONG = 300
"""Tokens of an answer that goes on while roles change."""


async def test_a_worker_changes_its_role_while_it_serves(
    start_stack: StartStack, expected: Any, monkeypatch: Any
) -> None:
    """Both decode workers have long answers under way, and each is a prefill worker for a while."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    prompts = [make_prompt(60, seed) for seed in range(4)]
    beginnings = [expected("llama", prompt) for prompt in prompts]
    with (
        RedisProcess() as redis,
        start_stack("llama", num_decode=2, redis_url=redis.url, num_blocks=4096) as stack,
        AdminClient(stack.admin_address) as admin,
    ):

        async def change(worker_id: str, role: Literal["prefill", "decode"]) -> None:
            await asyncio.to_thread(admin.change_role, worker_id, role)
            roles = {worker.worker_id: worker.role for worker in await asyncio.to_thread(admin.workers)}
            assert roles[worker_id] == role

        async with connect(stack) as (client, workers):
            long = [await begin(client, prompt, max_tokens=LONG, **GREEDY) for prompt in prompts]
            for worker_id in ("decode-0", "decode-1"):
                await change(worker_id, "prefill")
                await check_answers(client, prompts, beginnings)
                await change(worker_id, "decode")
            for beginning, answer in zip(beginnings, long, strict=True):
                tokens, num_retries = await answer
                assert (tokens[:64], len(tokens), num_retries) == (beginning, LONG, 0)
            await _cache_stays(admin, client, workers, prompts[0], beginnings[0])
            await _later_routers_know(admin, client, redis)


async def _cache_stays(
    admin: AdminClient, client: AsyncClient, workers: Any, prompt: list[int], tokens: list[int]
) -> None:
    """A repeated prompt is cached on a worker that had another role when it got the blocks."""
    await asyncio.to_thread(admin.drain, "decode-1")
    await client.generate(prompt, max_tokens=1, **GREEDY)
    await asyncio.to_thread(admin.drain, "decode-1", undo=True)
    before = (await wait_until_idle(workers))["decode-0"].cached_blocks
    await asyncio.to_thread(admin.change_role, "decode-0", "prefill")
    assert (await wait_until_idle(workers))["decode-0"].cached_blocks == before > 0
    # decode-0 is now the only one that computes prompts.
    await asyncio.to_thread(admin.drain, "prefill-0")
    again = await client.generate(prompt, max_tokens=64, **GREEDY)
    assert list(again.token_ids) == tokens
    assert again.usage.cached_prompt_tokens >= 48
    await asyncio.to_thread(admin.drain, "prefill-0", undo=True)


async def _later_routers_know(admin: AdminClient, client: AsyncClient, redis: RedisProcess) -> None:
    """A router that starts later knows the role of decode-0, and both follow each other's changes."""
    config = RouterConfig(port=0, redis_url=redis.router_url, cluster_secret=b"shared")
    async with router(config) as later, AsyncClient(later.address) as later_client:
        await asyncio.wait_for(later.has_served.wait(), WAIT_SECONDS)
        await until(lambda: len(later.workers.live("prefill")) == 2)
        assert [worker.worker_id for worker in later.workers.live("decode")] == ["decode-1"]
        await asyncio.to_thread(admin.change_role, "decode-0", "decode")
        await until_decode_workers(later_client, 2)
        with AdminClient(later.addresses.admin) as later_admin:
            await asyncio.to_thread(later_admin.change_role, "decode-1", "prefill")
        await until_decode_workers(client, 1)
        with pytest.raises(Unsupported, match="no decode worker that takes requests"):
            await asyncio.to_thread(admin.change_role, "decode-0", "prefill")
