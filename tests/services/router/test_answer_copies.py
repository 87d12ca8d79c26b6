"""Copies of running answers: when they are made, where they go, and how many run."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from quire.protos import worker_pb2
from quire.sampling.params import SamplingParams
from quire.services.router.execution.attempt import OnParts
from quire.services.router.migration.copies import INTERVAL_TOKENS, MAX_UNDER_WAY, Copies, CopyMetrics
from quire.services.router.workers.health import WorkerHealth
from tests.testing.router_parts import Spawned

SCOPE = worker_pb2.CacheScope(tenant="t")
PROMPT = [1, 2, 3]


class Worker:
    """A worker that copies when it is told to."""

    def __init__(self, name: str) -> None:
        self.worker_id, self.peer_address, self.can_serve = name, f"{name}:1", True
        self.health, self.revision = WorkerHealth(), "a"
        self.info = SimpleNamespace(epoch="e", layout=SimpleNamespace(block_size=4))
        self.stub = self
        self.copies: list[worker_pb2.CopyBlocksRequest] = []
        self.may_copy = asyncio.Event()

    async def CopyBlocks(
        self, request: worker_pb2.CopyBlocksRequest, **options: Any
    ) -> worker_pb2.CopyBlocksResponse:
        self.copies.append(request)
        await self.may_copy.wait()
        return worker_pb2.CopyBlocksResponse(pulled=worker_pb2.PullSummary(num_blocks=2))


class Followed(NamedTuple):
    """An attempt whose answers are copied as they grow."""

    group: Group
    on_parts: OnParts


class Setup:
    """Answers on the worker ``d0``, with three other decode workers and a prefill worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decode, self.prefill = [Worker(f"d{i}") for i in range(4)], Worker("p")
        spawned = Spawned()
        self.tasks = spawned.tasks
        workers: Any = SimpleNamespace(
            serving=lambda role: self.decode if role == "decode" else [self.prefill],
            call_on_drain=Mock(),
            call_on_return=Mock(),
        )
        self.copies = Copies(workers, spawned.spawn, CopyMetrics(self.registry), copies_grown=True)
        self._followed = ExitStack()

    def follow(self, name: str = "a", num_answers: int = 1, *, has_prefill: bool = False) -> Followed:
        group: Any = Group(name, PROMPT, [SimpleNamespace(token_ids=[]) for _ in range(num_answers)])
        prefill = self.prefill if has_prefill else None
        attempt: Any = SimpleNamespace(decode=self.decode[0], prefill=prefill, group=group, scope=SCOPE)
        on_parts = self._followed.enter_context(self.copies.follow(attempt))
        assert on_parts is not None
        return Followed(group, on_parts)

    @property
    def requests(self) -> list[tuple[str, worker_pb2.CopyBlocksRequest]]:
        return [(each.worker_id, copy) for each in (*self.decode, self.prefill) for copy in each.copies]

    async def finish(self) -> None:
        for worker in (*self.decode, self.prefill):
            worker.may_copy.set()
        await asyncio.gather(*self.tasks)


class Group(SimpleNamespace):
    """Answers that grow."""

    def __init__(self, sequence_id: str, prompt_token_ids: list[int], answers: list[Any]) -> None:
        super().__init__(
            sequence_id=sequence_id,
            prompt_token_ids=prompt_token_ids,
            answers=answers,
            is_finished=False,
            is_beam_search=False,
            params=SamplingParams(),
        )

    @property
    def num_tokens(self) -> int:
        return min(len(answer.token_ids) for answer in self.answers)


def grow(followed: Followed, num_tokens: int) -> None:
    for answer in followed.group.answers:
        answer.token_ids += range(num_tokens)
    followed.on_parts()


@pytest.fixture
async def setup() -> Setup:
    return Setup()


async def test_an_answer_is_copied_after_each_interval(setup: Setup) -> None:
    followed = setup.follow()
    grow(followed, INTERVAL_TOKENS - 1)
    assert setup.tasks == []
    grow(followed, 1)
    await setup.finish()
    ((_, first),) = setup.requests
    assert list(first.token_ids) == [*PROMPT, *followed.group.answers[0].token_ids]
    assert first.time == worker_pb2.COPY_TIME_ROOM
    assert (first.pull_from.address, first.pull_from.epoch) == ("d0:1", "e")
    assert first.pull_from.num_blocks == (len(PROMPT) + INTERVAL_TOKENS - 1) // 4
    assert first.cache_scope == SCOPE
    grow(followed, INTERVAL_TOKENS - 1)
    assert len(setup.tasks) == 1
    grow(followed, 1)
    await setup.finish()
    assert len(setup.requests) == 2
    assert setup.registry.get_sample_value("quire_answer_copies_total", {"result": "ok"}) == 2
    assert setup.registry.get_sample_value("quire_answer_copy_blocks_total") == 4


async def test_an_answer_has_one_copy_in_flight(setup: Setup) -> None:
    followed = setup.follow()
    for _ in range(3):
        grow(followed, INTERVAL_TOKENS)
    assert len(setup.tasks) == 1
    await setup.finish()
    grow(followed, 0)
    assert len(setup.tasks) == 2, "it grew by more than the interval meanwhile"
    await setup.finish()


async def test_a_finished_answer_is_not_copied(setup: Setup) -> None:
    followed = setup.follow()
    vars(followed.group)["is_finished"] = True
    grow(followed, INTERVAL_TOKENS)
    assert setup.tasks == []


async def test_the_copies_of_an_answer_have_one_place(setup: Setup) -> None:
    places = []
    for name in map(str, range(40)):
        followed = setup.follow(name)
        for _ in range(2):
            grow(followed, INTERVAL_TOKENS)
            await setup.finish()
        places.append({place for place, _ in setup.requests})
        for worker in setup.decode:
            worker.copies.clear()
    assert all(len(each) == 1 for each in places)
    assert set().union(*places) == {"d1", "d2", "d3"}, "never its own worker, and all others"


async def test_the_prefill_worker_is_the_place_while_it_serves(setup: Setup) -> None:
    grow(setup.follow(has_prefill=True), INTERVAL_TOKENS)
    await setup.finish()
    assert [place for place, _ in setup.requests] == ["p"]
    setup.prefill.can_serve = False
    grow(setup.follow(has_prefill=True), INTERVAL_TOKENS)
    await setup.finish()
    assert len(setup.requests) == 2
    assert len(setup.prefill.copies) == 1


async def test_without_another_worker_nothing_is_copied(setup: Setup) -> None:
    del setup.decode[1:]
    setup.prefill.copies.clear()
    grow(setup.follow(), INTERVAL_TOKENS)
    await setup.finish()
    assert [place for place, _ in setup.requests] == ["p"], "a prefill worker is better than none"


async def test_few_copies_run_at_once_and_the_others_wait(setup: Setup) -> None:
    followed = [setup.follow(str(i)) for i in range(MAX_UNDER_WAY + 1)]
    for each in followed:
        grow(each, INTERVAL_TOKENS)
        await asyncio.sleep(0)
    assert len(setup.tasks) == MAX_UNDER_WAY
    await setup.finish()
    grow(followed[-1], 1)
    assert len(setup.tasks) == MAX_UNDER_WAY + 1
    await setup.finish()


async def test_each_answer_of_a_request_is_copied(setup: Setup) -> None:
    grow(setup.follow(num_answers=2), INTERVAL_TOKENS)
    await setup.finish()
    assert len(setup.requests) == 2
