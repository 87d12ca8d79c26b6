"""``quire admin drain`` holds when it returns: the router sends nothing more to the worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.client import AsyncClient, Unavailable
from quire.client.admin import AdminClient
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from tests.testing.stacks import StartStack, connect, make_prompt

ROUNDS = 8
WAIT_SECONDS = 30.0


async def until_all_drain(client: AsyncClient) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while (await client.model_info()).num_decode_workers:
            await asyncio.sleep(0.01)


async def test_a_drain_holds_when_it_returns(start_stack: StartStack, monkeypatch: Any) -> None:
    """The router that was asked has stopped; another one follows within its refresh."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    prompt = make_prompt(20)
    with (
        RedisProcess() as redis,
        start_stack("llama", redis_url=redis.url, worker_wait_seconds=0.0) as stack,
    ):
        config = RouterConfig(
            port=0, redis_url=redis.router_url, cluster_secret=b"shared", worker_wait_seconds=0.0
        )
        with AdminClient(stack.admin_address) as admin:
            async with (
                connect(stack) as (client, _),
                router(config) as other,
                AsyncClient(other.address) as other_client,
            ):
                await asyncio.wait_for(other.has_served.wait(), WAIT_SECONDS)
                for _ in range(ROUNDS):
                    await asyncio.to_thread(admin.drain, "decode-0")
                    with pytest.raises(Unavailable, match="draining") as caught:
                        await client.generate(prompt, max_tokens=1)
                    assert caught.value.reason == "DRAINING"
                    await asyncio.to_thread(admin.drain, "decode-0", undo=True)
                    await client.generate(prompt, max_tokens=1)
                await asyncio.to_thread(admin.drain, "decode-0")
                await until_all_drain(other_client)
                with pytest.raises(Unavailable, match="draining"):
                    await other_client.generate(prompt, max_tokens=1)
                with pytest.raises(Unavailable, match="draining"):
                    await client.generate(prompt, max_tokens=1)
