"""The only decode worker restarts, and clients see a pause and no error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.client import AsyncClient
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from tests.testing.processes import worker_process
from tests.testing.stacks import GREEDY, begin, make_prompt
from tests.testing.until import until

SECONDS = 300.0
NUM_TOKENS, NUM_REQUESTS = 400, 3
OPTIONS = GREEDY | {"max_tokens": NUM_TOKENS}


def num_waiting(running: RunningRouter) -> float:
    return running.metrics.registry.get_sample_value("quire_router_requests_waiting") or 0.0


async def test_requests_outlast_the_restart_of_the_only_worker(
    tiny_model: Callable[[str], Path], expected: Any, monkeypatch: Any
) -> None:
    """It is first stopped in order, and then killed in the middle of answers; then another one starts."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    prompts = [make_prompt(60, seed) for seed in range(NUM_REQUESTS)]
    beginnings = [expected("llama", prompt) for prompt in prompts]
    model = tiny_model("llama")
    with RedisProcess() as redis:
        config = RouterConfig(
            port=0,
            metrics_port=0,
            redis_url=redis.url,
            cluster_secret=b"shared",
            worker_wait_seconds=SECONDS,
            poll_seconds=0.2,
        )
        async with (
            asyncio.timeout(SECONDS),
            router(config) as running,
            AsyncClient(running.address) as client,
        ):

            def ask() -> list[asyncio.Task[Any]]:
                return [asyncio.create_task(client.generate(prompt, **OPTIONS)) for prompt in prompts]

            asked = ask()
            await until(lambda: num_waiting(running) == NUM_REQUESTS)
            with worker_process(model, redis.worker_url) as first:
                answers = [list((await each).token_ids) for each in asked]
                assert [each[: len(beginnings[0])] for each in answers] == beginnings
                streams = [await begin(client, prompt, **OPTIONS) for prompt in prompts]
                first.terminate()
                assert await asyncio.gather(*streams) == [(each, 0) for each in answers]
                assert await asyncio.to_thread(first.wait) == 0
            asked = ask()
            await until(lambda: num_waiting(running) == NUM_REQUESTS)
            with worker_process(model, redis.worker_url) as second:
                assert [list((await each).token_ids) for each in asked] == answers
                streams = [await begin(client, prompt, **OPTIONS) for prompt in prompts]
                second.kill()
            # On a busy machine an answer may have come to its end before the kill.
            await until(lambda: num_waiting(running) == sum(not stream.done() for stream in streams))
            with worker_process(model, redis.worker_url):
                assert [(await stream)[0] for stream in streams] == answers
            assert num_waiting(running) == 0
