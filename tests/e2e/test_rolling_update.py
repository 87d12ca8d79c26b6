"""Workers are replaced one by one by those of a version whose kernels compute other bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire.client import AsyncClient
from quire.engine.model.arithmetic import SUMS
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from tests.testing.forked import Forked
from tests.testing.processes import QUIRE, worker_process
from tests.testing.stacks import GREEDY, make_prompt
from tests.testing.until import until

WAIT_SECONDS = 60.0
NUM_NEW, LONG = 64, 400
OLD, NEW = SUMS[-1].name, "float32-next"
# The next version: every greedy token is one larger, and its kernels make other sums.
NEXT = f"""
from quire.engine.model import arithmetic
from quire.engine.runner.model_runner import ModelRunner

forward = ModelRunner.forward
ModelRunner.forward = lambda self, step: forward(self, step).roll(1, -1)
arithmetic.SUMS = (arithmetic.Sums({NEW!r}),)
{QUIRE[-1]}
"""


def arithmetics(running: RunningRouter) -> list[str]:
    return [worker.info.layout.arithmetic for worker in running.workers.serving("decode")]


def num_alike(tokens: list[int], others: list[int]) -> int:
    """Return how many leading tokens are equal."""
    return next(
        (i for i, pair in enumerate(zip(tokens, others, strict=True)) if len({*pair}) > 1), len(tokens)
    )


async def test_workers_of_two_arithmetics_share_no_block_and_lose_no_request(
    tiny_model: Callable[[str], Path], expected: Any, monkeypatch: Any
) -> None:
    """Load goes to two workers, and two of the next version take their places."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    prompts = [make_prompt(60, seed) for seed in range(3)]
    with RedisProcess() as redis, ExitStack() as stack:

        def start(program: str) -> Forked:
            return stack.enter_context(
                worker_process(tiny_model("llama"), redis.worker_url, "--grace-period", "60", program=program)
            )

        config = RouterConfig(port=0, redis_url=redis.url, cluster_secret=b"shared", poll_seconds=0.1)
        old = [start(QUIRE[-1]) for _ in range(2)]
        async with router(config) as running, AsyncClient(running.address, timeout=WAIT_SECONDS) as client:
            await until(lambda: arithmetics(running) == [OLD] * 2)
            for _ in range(2):
                start(NEXT)

            async def ask(prompt: list[int], max_tokens: int = NUM_NEW) -> list[int]:
                answer = await client.generate(prompt, max_tokens=max_tokens, **GREEDY)
                assert answer.usage.retries == 0
                return list(answer.token_ids)

            answers: list[tuple[list[int], list[int]]] = []
            old[0].terminate()
            while old[0].poll() is None:
                answers += zip(prompts, await asyncio.gather(*map(ask, prompts)), strict=True)
            assert all(tokens == expected("llama", prompt) for prompt, tokens in answers)

            streams = [client.stream(prompt, max_tokens=LONG, **GREEDY) for prompt in prompts]
            firsts = [list((await anext(stream)).token_ids) for stream in streams]
            old[1].kill()
            for prompt, first, stream in zip(prompts, firsts, streams, strict=True):
                tokens = first + [token async for delta in stream for token in delta.token_ids]
                assert len(tokens) == LONG
                num_old = num_alike(tokens[:NUM_NEW], expected("llama", prompt))
                # The reference has NUM_NEW tokens, and a fast worker may have sent more of them at once.
                assert num_old >= min(len(first), NUM_NEW)
                if num_old < NUM_NEW:
                    # What follows is the next version's, which computed all of the context itself.
                    again = await client.generate(
                        prompt + tokens[:num_old], max_tokens=LONG - num_old, cache_salt="none", **GREEDY
                    )
                    assert again.usage.cached_prompt_tokens == 0
                    assert tokens[num_old:] == list(again.token_ids)
            await until(lambda: arithmetics(running) == [NEW] * 2)
