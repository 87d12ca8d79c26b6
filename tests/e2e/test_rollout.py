"""Workers of a new model take the place of the old ones under load, and every answer is one model's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from quire.client import AsyncClient
from quire.client.admin import AdminClient
from quire.routing.placement import PolicyConfig
from quire.services.local.redis_process import RedisProcess
from quire.services.router.app import router
from quire.services.router.config import RouterConfig
from tests.testing.forked import Forked
from tests.testing.processes import worker_process
from tests.testing.stacks import GREEDY, make_prompt
from tests.testing.tiny_models import generate_greedy, load_reference
from tests.testing.until import until

WAIT_SECONDS = 60.0
NUM_NEW, NUM_STREAMS = 32, 4


class Answer(NamedTuple):
    """An answer, and the labels of its workers."""

    prompt: int
    tokens: list[int]
    workers: tuple[str, ...]
    retries: int


async def test_a_rollout_loses_no_request_and_mixes_no_revisions(
    tiny_model: Callable[..., Path], monkeypatch: Any
) -> None:
    monkeypatch.setenv("QUIRE_CLUSTER_SECRET", "shared")
    models = {"old": tiny_model("llama"), "new": tiny_model("llama", rms_norm_eps=1e-2)}
    prompts = [make_prompt(60, seed) for seed in range(3)]
    references = {
        name: [generate_greedy(load_reference(folder), prompt, NUM_NEW) for prompt in prompts]
        for name, folder in models.items()
    }
    assert references["old"] != references["new"]
    answers: list[Answer] = []
    with RedisProcess() as redis, ExitStack() as stack:

        def start(role: str, model: str) -> Forked:
            settings = "--served-model-name", "tiny", "--grace-period", "60"
            worker = worker_process(models[model], redis.worker_url, *settings, role=role)
            return stack.enter_context(worker)

        config = RouterConfig(
            port=0,
            redis_url=redis.url,
            cluster_secret=b"shared",
            poll_seconds=0.1,
            placing=PolicyConfig(local_prefill_tokens=0),
        )
        async with router(config) as running, AsyncClient(running.address, timeout=WAIT_SECONDS) as client:

            def states() -> dict[str, str]:
                return {each.label: state for each, state in running.workers.states().items()}

            async def ask_forever(number: int) -> None:
                while True:
                    number = (number + 1) % len(prompts)
                    answer = await client.generate(
                        prompts[number], max_tokens=NUM_NEW, cache_salt=str(len(answers)), **GREEDY
                    )
                    usage = answer.usage
                    answers.append(
                        Answer(number, list(answer.token_ids), tuple(usage.workers), usage.retries)
                    )

            async def more(count: int = 12) -> list[Answer]:
                """Return the next answers to requests that begin from now on."""
                first = len(answers) + NUM_STREAMS
                await until(lambda: len(answers) >= first + count or any(each.done() for each in load))
                return answers[first:]

            old = [start("prefill", "old"), start("decode", "old")]
            await until(lambda: states() == {"P1": "serving", "D1": "serving"})
            revisions = {"old": running.workers.receiving()}
            load = [asyncio.create_task(ask_forever(number)) for number in range(NUM_STREAMS)]
            start("prefill", "new")
            await until(lambda: states() == {"P1": "serving", "D1": "serving", "P2": "waiting"})
            with AdminClient(running.admin_address) as admin:
                listed = await asyncio.to_thread(admin.workers)
            assert [each.state for each in listed if [each.revision] != revisions["old"]] == ["waiting"]
            assert {each.workers for each in await more()} == {("P1", "D1")}
            start("decode", "new")
            await until(lambda: set(states().values()) == {"serving"} and len(states()) == 4)
            await until(lambda: answers[-1].workers == ("P2", "D2"))
            for worker in old:
                worker.terminate()
            await until(lambda: all(worker.poll() == 0 for worker in old))
            assert {each.workers for each in await more()} == {("P2", "D2")}
            for task in load:
                task.cancel()
            ends = await asyncio.gather(*load, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends), "a request failed"
    assert {each.workers for each in answers} == {("P1", "D1"), ("P2", "D2")}
    for each in answers:
        assert each.retries == 0
        assert each.tokens == references["old" if each.workers[0] == "P1" else "new"][each.prompt]
