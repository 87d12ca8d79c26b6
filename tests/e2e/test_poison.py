"""Requests on workers that end: only one that ends each worker that computes it is refused."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient, ServerError
from quire.rpc.errors import SUSPECTED
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from tests.testing.forked import Forked
from tests.testing.processes import scripted_workers
from tests.testing.stacks import make_prompt

NUM_WORKERS, NUM_INNOCENT, NUM_TOKENS = 3, 12, 48
SECONDS = 120.0
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
PROGRAM = """
import os, signal
prepare = ModelRunner.prepare

def deadly(self, scheduled):
    if any(each.sequence.attempt_id.startswith("poison") for each in scheduled):
        os.kill(os.getpid(), signal.SIGKILL)
    return prepare(self, scheduled)

def begin():
    ModelRunner.prepare = deadly
"""


@pytest.fixture
def workers(tiny_model: Callable[[str], Path]) -> Iterator[dict[str, Forked]]:
    """Start decode workers that die of a certain request; yield them by their addresses."""
    with scripted_workers(PROGRAM, tiny_model("llama"), count=NUM_WORKERS) as running:
        yield {worker.address: worker.process for worker in running}


async def test_a_request_that_kills_workers_is_refused_and_the_others_continue(
    workers: dict[str, Forked], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine suspects may take long to clear themselves.
    monkeypatch.setattr("quire.services.router.execution.suspects.PATIENCE_SECONDS", SECONDS)
    config = RouterConfig(port=0, metrics_port=0, worker_addresses=tuple(workers), poll_seconds=0.1)
    prompts = [make_prompt(24, seed) for seed in range(NUM_INNOCENT)]
    async with asyncio.timeout(SECONDS), router(config) as running:
        while len(running.workers.live("decode")) < NUM_WORKERS:
            await running.workers.refresh()
        async with AsyncClient(running.address) as client:
            asked = (client.generate(prompt, **OPTIONS) for prompt in prompts)
            expected = [list(each.token_ids) for each in await asyncio.gather(*asked)]
            have_begun = [asyncio.Event() for _ in prompts]

            async def stream(prompt: list[int], has_begun: asyncio.Event) -> list[int]:
                tokens: list[int] = []
                async for delta in client.stream(prompt, **OPTIONS):
                    tokens += delta.token_ids
                    has_begun.set()
                return tokens

            streams = [asyncio.create_task(stream(*each)) for each in zip(prompts, have_begun, strict=True)]
            await asyncio.gather(*(each.wait() for each in have_begun))
            with pytest.raises(ServerError) as refused:
                await client.generate(make_prompt(24, 99), request_id="poison", **OPTIONS)
            assert refused.value.reason == SUSPECTED
            assert await asyncio.gather(*streams) == expected
            while len(running.workers.live("decode")) > 1:
                await running.workers.refresh()
            [survivor] = (worker.address for worker in running.workers.live("decode"))
            # A process closes its connections a little before it counts as ended.
            ended = {at: process.wait() for at, process in workers.items() if at != survivor}
            assert set(ended.values()) == {-signal.SIGKILL}
            assert workers[survivor].poll() is None
            assert list((await client.generate(prompts[0], **OPTIONS)).token_ids) == expected[0]


async def test_workers_that_are_killed_together_make_no_request_a_suspect(workers: dict[str, Forked]) -> None:
    *victims, survivor = workers
    options = {**OPTIONS, "max_tokens": 200}
    config = RouterConfig(port=0, metrics_port=0, worker_addresses=tuple(workers), poll_seconds=0.1)
    prompt = make_prompt(24, 1)
    async with asyncio.timeout(SECONDS), router(config) as running:
        while len(running.workers.live("decode")) < NUM_WORKERS:
            await running.workers.refresh()
        found = {worker.address: worker for worker in running.workers.live("decode")}
        async with AsyncClient(running.address) as client:
            expected = list((await client.generate(prompt, **options)).token_ids)
            # Requests prefer the victims.
            found[survivor].resident_tokens = found[survivor].pending_tokens = 10**6
            deltas = client.stream(prompt, **options)
            tokens = [*(await anext(deltas)).token_ids]
            [first] = [address for address in victims if found[address].num_requests]
            [second] = set(victims) - {first}

            async def kill_once_used() -> None:
                while not found[second].num_requests:
                    await asyncio.sleep(0)
                workers[second].kill()

            # Both are ended at the same moment, and the connections of one of them stay open for a while.
            workers[second].send_signal(signal.SIGSTOP)
            workers[first].kill()
            killing = asyncio.create_task(kill_once_used())
            async for delta in deltas:
                tokens += delta.token_ids
            assert tokens == expected
            assert not killing.done()
            killing.cancel()
