"""Workers whose kernels make other sums: which ones a router uses, and which blocks on disk they read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.engine.model.arithmetic import SUMS
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from tests.testing.processes import QUIRE, worker_process
from tests.testing.stacks import GREEDY, make_prompt
from tests.testing.until import until

WAIT_SECONDS = 60.0
# A machine with faster sums, which are chosen unless the worker must be portable.
FAST = f"""
from quire.engine.model import arithmetic

arithmetic.SUMS = (arithmetic.Sums("fast-1"), *arithmetic.SUMS)
{QUIRE[-1]}
"""
BLOCK_BYTES = 3 * 2 * 2 * 16 * 32 * 4


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")


def config(redis: RedisProcess) -> RouterConfig:
    return RouterConfig(port=0, redis_url=redis.url, cluster_secret=b"shared", poll_seconds=0.05)


def num_serving(running: RunningRouter) -> int:
    return list(running.workers.states().values()).count("serving")


async def test_machines_of_two_kinds_share_a_cluster_only_if_both_are_portable(
    tiny_model: Callable[[str], Path], expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = tiny_model("llama"), make_prompt(60)
    with RedisProcess() as redis, ExitStack() as stack:
        stack.enter_context(worker_process(model, redis.worker_url))
        async with router(config(redis)) as running, AsyncClient(running.address) as client:
            await until(lambda: num_serving(running) == 1)
            stack.enter_context(worker_process(model, redis.worker_url, program=FAST))
            name = "worker_has_other_arithmetic"
            warned = await until(lambda: [r for r in caplog.records if r.message == name])
            assert num_serving(running) == 1
            problem = vars(warned[0])["fields"]["details"]
            for text in ("fast-1", SUMS[-1].name, "--arithmetic portable"):
                assert text in problem
            stack.enter_context(
                worker_process(model, redis.worker_url, "--arithmetic", "portable", program=FAST)
            )
            await until(lambda: num_serving(running) == 2)
            answer = await client.generate(prompt, max_tokens=64, **GREEDY)
            assert list(answer.token_ids) == expected("llama", prompt)


async def test_a_disk_tier_that_is_kept_replays_no_block_of_another_arithmetic(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = ["--num-blocks", "26", "--max-num-seqs", "4", "--host-cache", str(40 * BLOCK_BYTES)]
    settings += ["--disk-cache", f"{tmp_path}:{400 * (BLOCK_BYTES + 32)}"]
    prompts = [make_prompt(330, seed) for seed in range(4)]

    async def cached_tokens(program: str) -> int:
        with RedisProcess() as redis, ExitStack() as stack:
            worker = stack.enter_context(
                worker_process(tiny_model("llama"), redis.worker_url, *settings, program=program)
            )
            async with router(config(redis)) as running, AsyncClient(running.address) as client:
                await until(lambda: num_serving(running) == 1)
                answers = [await client.generate(prompt, max_tokens=64, **GREEDY) for prompt in prompts]
            worker.terminate()
            await asyncio.to_thread(worker.wait, WAIT_SECONDS)
        return sum(answer.usage.cached_prompt_tokens for answer in answers)

    assert await cached_tokens(QUIRE[-1]) == 0
    assert await cached_tokens(QUIRE[-1]) > 0
    assert await cached_tokens(FAST) == 0
