"""Two routers in front of the same workers know each other's load."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.client import AsyncClient
from quire.services.router.app import RunningRouter, router
from quire.services.router.config import RouterConfig
from tests.testing.stacks import StartStack, make_prompt
from tests.testing.until import until

NUM_BUSY, NUM_REQUESTS = 6, 8
WAIT_SECONDS = 60.0


def loads(running: RunningRouter) -> dict[str, tuple[int, int]]:
    """Return the number of requests on each worker: this router's, and those of others."""
    return {
        worker.worker_id: (worker.num_requests, worker.load_of_others.num_requests)
        for worker in running.workers.all()
    }


async def send_until_cancelled(client: AsyncClient, prompt: list[int], max_tokens: int) -> None:
    while True:
        await client.generate(prompt, max_tokens=max_tokens, ignore_eos=True)


async def test_a_router_places_requests_on_the_worker_that_the_other_router_does_not_load(
    start_stack: StartStack, monkeypatch: Any
) -> None:
    """The first router knows one worker only, and fills it; the second knows both."""
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    with start_stack("llama", num_prefill=0, num_decode=2) as stack:
        addresses = [stack.ready[name].address for name in ("decode-0", "decode-1")]

        def config(*known: str) -> RouterConfig:
            return RouterConfig(port=0, worker_addresses=known, cluster_secret=b"shared")

        async with (
            router(config(addresses[0])) as first,
            router(config(*addresses)) as second,
            AsyncClient(first.address, timeout=WAIT_SECONDS) as client,
            AsyncClient(second.address, timeout=WAIT_SECONDS) as other_client,
        ):
            for each in (first, second):
                await asyncio.wait_for(each.has_served.wait(), WAIT_SECONDS)
            await until(lambda: len(loads(second)) == 2)
            prompts = [make_prompt(40, seed=seed) for seed in range(NUM_BUSY)]
            # Of different lengths, so that they do not all end in the same step.
            busy = [
                asyncio.create_task(send_until_cancelled(client, prompt, 430 - 31 * index))
                for index, prompt in enumerate(prompts)
            ]
            # The same prompts: the prefix is cached on the busy worker and nowhere else.
            for seed in range(NUM_REQUESTS):
                prompt = make_prompt(40, seed=seed)
                await until(lambda: loads(second)["decode-0"][1] >= NUM_BUSY - 1)
                answer = asyncio.create_task(other_client.generate(prompt, max_tokens=300, ignore_eos=True))
                await until(lambda: any(own for own, _ in loads(second).values()))
                assert [loads(second)[f"decode-{i}"][0] for i in range(2)] == [0, 1]
                await answer
                await until(lambda: loads(second)["decode-1"][0] == 0)
            assert loads(first)["decode-0"][1] == 0
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)
            # The worker can report the end of a request before the router that sent it ends its own part.
            await until(lambda: set(loads(second).values()) == set(loads(first).values()) == {(0, 0)})
