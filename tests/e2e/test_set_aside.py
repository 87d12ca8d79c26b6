"""Workers that are killed, that vanish or whose engine hangs are soon set aside; slow ones are not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient
from quire.client.types import Delta
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from quire.services.router.workers.worker import Worker
from tests.soak.chaos.proxy import Link, proxy_before
from tests.testing.forked import Forked
from tests.testing.processes import SLOW_STEPS, scripted_workers
from tests.testing.stacks import make_prompt, rest_of
from tests.testing.until import until

SECONDS = 120.0
PROMPT_SECONDS = 3.0
"""Computation of the long prompt."""
LAG_SECONDS = 3.0
NOTICED = ("worker_set_aside", "worker_stalled", "worker_left")
"""What a router logs of a worker that does not answer."""
NUM_TOKENS, NUM_BEFORE = 160, 24
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
LONG_PROMPT = 400
PROGRAM = (
    SLOW_STEPS
    + """
import signal
prompt_length, prompt_seconds, lag_seconds = map(float, sys.argv[2:])

def begin():
    signal.signal(signal.SIGUSR1, lambda *_: may_step.clear())
    signal.signal(signal.SIGUSR2, lambda *_: may_step.set())
    signal.signal(signal.SIGHUP, lambda *_: (time.sleep(lag_seconds), print("lagged", flush=True)))
"""
)


@dataclass
class Setup:
    """A router and its two decode workers."""

    running: RunningRouter
    client: AsyncClient
    processes: dict[str, Forked]
    links: dict[str, Link]
    """The processes and the ways to them, by the address at which the router finds them."""

    def serving(self) -> list[str]:
        return sorted(worker.address for worker in self.running.workers.serving("decode"))

    def busy(self) -> Worker:
        """Return the worker that has a request."""
        (worker,) = (worker for worker in self.running.workers.all() if worker.num_requests)
        return worker


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[[str], Path]) -> Iterator[dict[str, Forked]]:
    """Start two workers, which take long for long prompts; yield them by their addresses."""
    arguments = (tiny_model("llama"), LONG_PROMPT, PROMPT_SECONDS, LAG_SECONDS)
    with scripted_workers(PROGRAM, *arguments, count=2) as running:
        yield {worker.address: worker.process for worker in running}


@asynccontextmanager
async def setup_of(processes: dict[str, Forked]) -> AsyncIterator[Setup]:
    """Run a router in front of the workers; each has a proxy of its own before it."""
    async with AsyncExitStack() as stack:
        links, by_address = {}, {}
        for address, process in processes.items():
            link, server_port = Link(), int(address.rpartition(":")[2])
            before = proxy_before(server_port, {"router": link}, lambda *_: "router")
            proxied = f"127.0.0.1:{(await stack.enter_async_context(before)).port}"
            links[proxied], by_address[proxied] = link, process
        config = RouterConfig(port=0, metrics_port=0, worker_addresses=tuple(links), poll_seconds=0.2)
        running = await stack.enter_async_context(router(config))
        client = await stack.enter_async_context(AsyncClient(running.address))
        setup = Setup(running, client, by_address, links)
        await until(lambda: len(setup.serving()) == 2 and running.has_served.is_set())
        yield setup


async def begun(setup: Setup, prompt: list[int]) -> tuple[AsyncIterator[Delta], list[int]]:
    """Return a stream that has begun, and the tokens that it brought."""
    stream, tokens = setup.client.stream(prompt, **OPTIONS), list[int]()
    while len(tokens) < NUM_BEFORE:
        tokens += (await anext(stream)).token_ids
    return stream, tokens


FAULTS: dict[str, tuple[Callable[[Setup, str], None], Callable[[Setup, str], None]]] = {
    "stopped": (
        lambda setup, address: setup.processes[address].send_signal(signal.SIGSTOP),
        lambda setup, address: setup.processes[address].send_signal(signal.SIGCONT),
    ),
    "cut off": (
        lambda setup, address: setup.links[address].is_open.clear(),
        lambda setup, address: setup.links[address].is_open.set(),
    ),
    "hangs in a step": (
        lambda setup, address: setup.processes[address].send_signal(signal.SIGUSR1),
        lambda setup, address: setup.processes[address].send_signal(signal.SIGUSR2),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_worker_that_vanishes_is_set_aside_until_it_answers(
    pair: dict[str, Forked], caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    break_off, mend = FAULTS[fault]
    async with asyncio.timeout(SECONDS), setup_of(pair) as setup:
        prompt = make_prompt(40)
        expected = list((await setup.client.generate(prompt, **OPTIONS)).token_ids)
        stream, tokens = await begun(setup, prompt)
        address = setup.busy().address
        break_off(setup, address)
        try:
            rest, num_retries = await rest_of(stream)
            assert (tokens + rest, num_retries) == (expected, 1)
            # Health checks would notice it later, and say that it has left.
            first = next(event for event in caplog.messages if event in NOTICED)
            assert first != "worker_left"
            assert address not in setup.serving()
            answer = await setup.client.generate(prompt, **OPTIONS)
            assert (list(answer.token_ids), answer.usage.retries) == (expected, 0)
        finally:
            mend(setup, address)
        await until(lambda: address in setup.serving())
        (other,) = set(setup.processes) - {address}
        setup.links[other].is_open.clear()
        answer = await setup.client.generate(prompt, **OPTIONS)
        assert list(answer.token_ids) == expected
        setup.links[other].is_open.set()


async def test_a_worker_whose_event_loop_lags_is_not_set_aside(
    pair: dict[str, Forked], caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(SECONDS), setup_of(pair) as setup:
        prompt = make_prompt(40)
        expected = list((await setup.client.generate(prompt, **OPTIONS)).token_ids)
        stream, tokens = await begun(setup, prompt)
        busy = setup.processes[setup.busy().address]
        busy.send_signal(signal.SIGHUP)
        rest, num_retries = await rest_of(stream)
        assert await asyncio.to_thread(busy.stdout.readline) == "lagged\n"
        assert (tokens + rest, num_retries) == (expected, 0)
        assert not set(NOTICED) & set(caplog.messages)


async def test_a_worker_with_a_long_prompt_is_not_set_aside(
    pair: dict[str, Forked], caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(SECONDS), setup_of(pair) as setup:
        answer = await setup.client.generate(make_prompt(LONG_PROMPT), **OPTIONS | {"max_tokens": 8})
        assert (len(answer.token_ids), answer.usage.retries) == (8, 0)
        assert not set(NOTICED) & set(caplog.messages)
