"""A client with two routers: one is killed in the middle of an answer, and the answer does not show it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient, Client, Delta, Overloaded, QuireError
from quire.services.local.redis_process import RedisProcess
from quire.services.local.stack import RunningStack
from quire.services.router.tenants.api_keys import Tenant
from quire.services.server.process import free_port
from tests.testing.api_keys import write_keys
from tests.testing.processes import QUIRE
from tests.testing.stacks import StartStack, connect, make_prompt, wait_until_idle
from tests.testing.until import until

SECRET = "shared"
START_SECONDS = 60.0
PROMPT_LENGTH = 40
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "number": {"type": "integer"}},
    "required": ["name", "number"],
    "additionalProperties": False,
}


@dataclass
class RouterProcess:
    """A router in a process of its own, always on the same port."""

    port: int
    redis_url: str
    api_keys: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        options: dict[str, Any] = {
            "port": self.port,
            "metrics-port": 0,
            "admin-port": 0,
            "redis-url": self.redis_url,
            "log-level": "error",
            "grace-period": 0,
        }
        if self.api_keys is not None:
            options["api-keys"] = str(self.api_keys)
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self.process = subprocess.Popen(
            [*QUIRE, "router", *flags], env={**os.environ, "QUIRE_CLUSTER_SECRET": SECRET}
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def serves(self, api_key: str | None = None) -> bool:
        try:
            with Client(self.address, timeout=2, api_key=api_key) as client:
                return bool(client.model_info().num_decode_workers)
        except QuireError:
            return False


@pytest.fixture(scope="module")
def stack(start_stack: StartStack, redis: RedisProcess) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CLUSTER_SECRET", SECRET)
        # Each step is a message, so that the answers are far from done after a few of them.
        options = {"num_prefill": 1, "num_decode": 2, "stream_interval": 0.0}
        with start_stack("llama", redis_url=redis.url, **options) as running:
            yield running


@pytest.fixture(scope="module")
def pair(stack: RunningStack, redis: RedisProcess) -> Iterator[list[RouterProcess]]:
    with ExitStack() as undo:
        routers = [RouterProcess(free_port(), redis.router_url) for _ in range(2)]
        for router in routers:
            router.start()
            undo.callback(router.kill)
        yield routers


@pytest.fixture
async def routers(pair: list[RouterProcess]) -> list[RouterProcess]:
    """Two routers that serve, also if the last test killed one of them."""
    for router in pair:
        assert router.process is not None
        if router.process.poll() is not None:
            router.start()
    for router in pair:
        await until(partial(asyncio.to_thread, router.serves))
    return pair


KINDS: dict[str, dict[str, Any]] = {
    "own seed": {},
    "penalties and logprobs": {
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "logprobs": 2,
    },
    "json": {"seed": 5, "json_schema": SCHEMA},
    "three answers": {"seed": 9, "n": 3},
}


def summary(deltas: list[Delta]) -> list[Any]:
    """Return all that a caller sees of each answer, and the counts."""
    indexes = sorted({delta.index for delta in deltas})
    (usage,) = [delta.usage for delta in deltas if delta.usage]
    return [
        *(
            (
                "".join(d.text for d in deltas if d.index == index),
                [token for d in deltas if d.index == index for token in d.token_ids],
                [
                    (round(each.logprob, 4), [top.token_id for top in each.top])
                    for d in deltas
                    if d.index == index
                    for each in d.logprobs
                ],
                [d.finish_reason for d in deltas if d.index == index and d.finish_reason],
            )
            for index in indexes
        ),
        (usage.prompt_tokens, usage.completion_tokens),
        [d.request_id for d in deltas if d.request_id],
    ]


async def killed_stream(routers: list[RouterProcess], prompt: list[int], **options: Any) -> list[Delta]:
    """Kill the router that serves the stream after its second message.

    On a busy machine, a few messages may have the whole answer.
    """
    deltas: list[Delta] = []
    # Calls begin at each router in turn: the first is the first in the list.
    async with (
        AsyncClient([router.address for router in routers], timeout=60) as client,
        aclosing(client.stream(prompt, **options)) as stream,
    ):
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 2:
                routers[0].kill()
    return deltas


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_survives_its_router(
    routers: list[RouterProcess], stack: RunningStack, kind: str
) -> None:
    prompt = make_prompt(PROMPT_LENGTH)
    options = {"max_tokens": 400, "request_id": "same", **KINDS[kind]}
    if kind != "json":
        options["ignore_eos"] = True
    if kind == "own seed":
        deltas = await killed_stream(routers, prompt, **options)
        assert len([token for delta in deltas for token in delta.token_ids]) == 400
        return
    async with AsyncClient(routers[1].address, timeout=60) as client:
        undisturbed = [delta async for delta in client.stream(prompt, **options)]
    broken = await killed_stream(routers, prompt, **options)
    assert summary(broken) == summary(undisturbed)
    (usage,) = [delta.usage for delta in broken if delta.usage]
    assert usage.retries >= 1
    async with connect(stack) as (_, workers):
        await wait_until_idle(workers)


async def test_an_answer_that_outlasts_a_routers_grace_period_continues(routers: list[RouterProcess]) -> None:
    prompt, process = make_prompt(PROMPT_LENGTH, seed=8), routers[0].process
    assert process is not None
    options: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "seed": 2, "request_id": "same"}
    async with AsyncClient(routers[1].address, timeout=60) as client:
        undisturbed = [delta async for delta in client.stream(prompt, **options)]
    deltas: list[Delta] = []
    async with AsyncClient([router.address for router in routers], timeout=60) as client:
        async for delta in client.stream(prompt, **options):
            deltas.append(delta)
            if len(deltas) == 4:
                process.terminate()
            if process.poll() is None:
                await asyncio.sleep(0.01)
    assert summary(deltas) == summary(undisturbed)
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.retries >= 1
    assert process.wait(START_SECONDS) == 0


async def test_new_calls_use_the_other_router_until_the_first_one_serves_again(
    routers: list[RouterProcess],
) -> None:
    prompt = make_prompt(PROMPT_LENGTH)
    addresses = [router.address for router in routers]
    with Client(addresses, timeout=60) as client:
        expected = await asyncio.to_thread(client.generate, prompt, max_tokens=8, temperature=0)
        routers[0].kill()
        for _ in range(4):
            found = await asyncio.to_thread(client.generate, prompt, max_tokens=8, temperature=0)
            assert found.token_ids == expected.token_ids
        routers[0].start()
        await until(partial(asyncio.to_thread, routers[0].serves))
        routers[1].kill()
        found = await asyncio.to_thread(client.generate, prompt, max_tokens=8, temperature=0)
        assert found.token_ids == expected.token_ids


async def test_a_limit_holds_for_two_routers_and_a_killed_one_gives_its_places_back(
    stack: RunningStack, redis: RedisProcess, tmp_path: Path
) -> None:
    file, [key] = write_keys(tmp_path, Tenant("single", max_requests=1))
    prompt = make_prompt(PROMPT_LENGTH)
    options: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "seed": 1}
    with ExitStack() as undo:
        pair = [RouterProcess(free_port(), redis.router_url, file) for _ in range(2)]
        for router in pair:
            router.start()
            undo.callback(router.kill)
        for router in pair:
            await until(partial(asyncio.to_thread, router.serves, key))
        addresses = [router.address for router in pair]
        async with (
            AsyncClient(addresses, timeout=60, api_key=key) as client,
            AsyncClient(addresses[1], timeout=60, api_key=key) as other,
        ):
            undisturbed = await other.generate(prompt, **options)
            tokens: list[int] = []
            async for delta in client.stream(prompt, **options):
                if not tokens:
                    with pytest.raises(Overloaded) as caught:
                        await other.generate(prompt, max_tokens=1)
                    assert caught.value.reason == "TENANT_REQUESTS"
                    pair[0].kill()
                tokens += delta.token_ids
            assert tokens == list(undisturbed.token_ids)
            await other.generate(prompt, max_tokens=1)
