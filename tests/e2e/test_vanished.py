"""Workers whose machines vanish: their connections stay open, and nothing answers any more."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.protos import worker_pb2 as pb
from quire.services.local.stack import RunningStack
from tests.testing.prometheus import free_ports
from tests.testing.stacks import StartStack, connect, make_prompt, metric, wait_until_idle

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 64}
WAIT_SECONDS = 30.0
"""Half of what gRPC would take to notice."""
_seeds = count(1000)


@pytest.fixture(scope="module")
def stack(start_stack: StartStack) -> Iterator[RunningStack]:
    """Run a router that soon takes a silent worker for lost."""
    with start_stack("llama", num_decode=2, silent_seconds=1.5, metrics_port=free_ports(4)) as running:
        yield running


@contextmanager
def vanished(stack: RunningStack, name: str) -> Iterator[None]:
    """Stop a worker's process for a while."""
    pid = stack.workers[name].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def busy(workers: dict[str, Any]) -> str:
    """Return the decode worker that has a request, once one has."""
    while True:
        for name in ("decode-0", "decode-1"):
            load = await workers[name].GetLoad(pb.GetLoadRequest())
            if load.num_running or load.num_transferring:
                return name
        await asyncio.sleep(0.005)


async def rejoined(client: AsyncClient) -> None:
    """Wait until the router uses all workers again; at first it prefers those that it does not doubt."""
    while True:
        info = await client.model_info()
        if (info.num_prefill_workers, info.num_decode_workers) == (1, 2):
            answer = await client.generate(make_prompt(60, next(_seeds)), max_tokens=2)
            if answer.usage.blocks_shipped:
                return
        await asyncio.sleep(0.02)


async def test_a_prompt_is_retried_elsewhere_when_its_prefill_worker_vanishes(
    stack: RunningStack, expected: Any
) -> None:
    prompt = make_prompt(60, seed=2)
    async with connect(stack) as (client, _), asyncio.timeout(WAIT_SECONDS):
        with vanished(stack, "prefill-0"):
            answer = await client.generate(prompt, **GREEDY)
        assert list(answer.token_ids) == expected("llama", prompt)
        # A busy machine may take so long that the router also takes a decode worker for lost.
        assert metric(stack, "router", "quire_retries_total", role="prefill") == 1
        assert metric(stack, "router", "quire_retries_total") == answer.usage.retries
        await rejoined(client)


async def test_a_push_ends_when_its_receiver_vanishes(stack: RunningStack, expected: Any) -> None:
    """The prefill worker is held up until the decode worker that waits for its blocks has vanished."""
    prompt = make_prompt(60, seed=3)
    async with connect(stack) as (client, workers), asyncio.timeout(WAIT_SECONDS):
        with ExitStack() as receiver:
            with vanished(stack, "prefill-0"):
                asking = asyncio.create_task(client.generate(prompt, **GREEDY))
                receiver.enter_context(vanished(stack, await busy(workers)))
            assert list((await asking).token_ids) == expected("llama", prompt)
            await wait_until_idle({"prefill-0": workers["prefill-0"]})
        await rejoined(client)
