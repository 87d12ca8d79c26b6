"""Copies of an answer's blocks: which are worth it, how many run, and how they are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from quire.protos import kvtransfer_pb2, worker_pb2
from quire.services.router.worker import Worker, WorkerConnection
from quire.services.router.write_back import (
    MAX_UNDER_WAY,
    WAIT_SECONDS,
    WriteBackCalls,
    WriteBackMetrics,
)

BLOCK_SIZE = 4


class Prefill:
    """A prefill worker that answers when it is told to."""

    def __init__(self) -> None:
        self.stub = self
        self.requests: list[worker_pb2.CopyBlocksRequest] = []
        self.may_answer = asyncio.Event()
        self.pulled = worker_pb2.PullSummary(num_blocks=2)
        self.error: Exception | None = None

    async def CopyBlocks(
        self, request: worker_pb2.CopyBlocksRequest, **options: Any
    ) -> worker_pb2.CopyBlocksResponse:
        self.requests.append(request)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return worker_pb2.CopyBlocksResponse(pulled=self.pulled)


class Setup:
    """Copies from one decode worker to one prefill worker."""

    def __init__(self) -> None:
        self.registry, self.prefill = CollectorRegistry(), Prefill()
        self.tasks: list[asyncio.Task[None]] = []
        self.calls = WriteBackCalls(self._spawn, WriteBackMetrics(self.registry))
        self._from, self._to = self._worker("d"), self._worker("p")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(coroutine))
        return self.tasks[-1]

    def _worker(self, name: str) -> Worker:
        info = worker_pb2.GetWorkerInfoResponse(
            worker_id=name,
            epoch=f"{name}-epoch",
            address=f"{name}:1",
            layout=kvtransfer_pb2.KvLayout(block_size=BLOCK_SIZE),
        )
        return Worker(f"{name}:1", info, cast(WorkerConnection, self.prefill))

    def offer(self, num_tokens: int = 13, num_prompt_tokens: int = 4) -> None:
        scope = worker_pb2.CacheScope(tenant="t", salt="s")
        self.calls.offer(self._from, self._to, list(range(num_tokens)), num_prompt_tokens, scope)

    async def finish(self) -> None:
        self.prefill.may_answer.set()
        await asyncio.gather(*self.tasks)

    def results(self) -> dict[str, float]:
        """Return the results that were counted."""
        return {
            sample.labels["result"]: sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "quire_write_backs_total" and sample.value
        }


@pytest.mark.parametrize(
    ("num_tokens", "num_prompt_tokens", "num_blocks"),
    [(13, 4, 3), (12, 4, 2), (9, 4, 2), (8, 4, None), (5, 4, None), (9, 8, None), (13, 7, 3)],
)
async def test_only_full_blocks_beyond_the_prompts_are_copied(
    num_tokens: int, num_prompt_tokens: int, num_blocks: int | None
) -> None:
    setup = Setup()
    setup.offer(num_tokens, num_prompt_tokens)
    await setup.finish()
    assert [each.pull_from.num_blocks for each in setup.prefill.requests] == (
        [] if num_blocks is None else [num_blocks]
    )


async def test_the_prefill_worker_learns_where_the_blocks_are() -> None:
    setup = Setup()
    setup.offer()
    setup.offer()
    await setup.finish()
    first, second = setup.prefill.requests
    assert list(first.token_ids) == list(range(13))
    assert (first.pull_from.address, first.pull_from.epoch) == ("d:1", "d-epoch")
    assert first.pull_from.timeout_ms == 1000 * WAIT_SECONDS
    assert (first.cache_scope.tenant, first.cache_scope.salt) == ("t", "s")
    assert first.sequence_id != second.sequence_id
    assert setup.results() == {"ok": 2}
    assert setup.registry.get_sample_value("quire_write_back_blocks_total") == 4


async def test_no_more_run_than_a_few_and_the_others_are_dropped() -> None:
    setup = Setup()
    for _ in range(MAX_UNDER_WAY + 2):
        setup.offer()
    assert setup.calls.num_under_way == len(setup.tasks) == MAX_UNDER_WAY
    await setup.finish()
    assert setup.results() == {"ok": MAX_UNDER_WAY, "dropped": 2}
    assert setup.calls.num_under_way == 0


@pytest.mark.parametrize("result", ["failed", "busy"])
async def test_a_copy_that_does_not_come_about_gives_its_place_back(result: str) -> None:
    setup = Setup()
    setup.prefill.pulled = worker_pb2.PullSummary(failure="busy")
    if result == "failed":
        nothing = grpc.aio.Metadata()
        setup.prefill.error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "", "")
    setup.offer()
    await setup.finish()
    assert setup.results() == {result: 1}
    assert setup.calls.num_under_way == 0


async def test_a_copy_that_is_cancelled_gives_its_place_back() -> None:
    setup = Setup()
    setup.offer()
    await asyncio.sleep(0)
    setup.tasks[0].cancel()
    await asyncio.wait(setup.tasks)
    assert setup.calls.num_under_way == 0
