"""The generations of one batch: their number, their order, and what one failure means for the others."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, ResourceExhausted, ServiceError
from quire.services.router.grpc.batch import MAX_BATCH_SIZE, batch_answers, check_batch_size

GENERATIONS = [pb.Generation(text=str(number)) for number in range(6)]


class Work:
    """Answers generations when it is told to, and keeps which of them run."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.running: set[str] = set()
        self.may_end: dict[str, asyncio.Event] = {each.text: asyncio.Event() for each in GENERATIONS}
        self.errors: dict[str, Exception] = {}

    async def perform(self, generation: pb.Generation) -> pb.GenerateResponse:
        name = generation.text
        self.begun.append(name)
        self.running.add(name)
        try:
            await self.may_end[name].wait()
            if name in self.errors:
                raise self.errors[name]
            return pb.GenerateResponse(request_id=name)
        finally:
            self.running.remove(name)

    def end(self, *names: str) -> None:
        for name in names:
            self.may_end[name].set()


@pytest.mark.parametrize("size", [0, MAX_BATCH_SIZE + 1])
def test_the_size_is_limited(size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"must hold from 1 to {MAX_BATCH_SIZE}; got {size}") as caught:
        check_batch_size(size)
    assert caught.value.metadata == {"field": "generations", "limit": str(MAX_BATCH_SIZE)}


def test_the_limits_themselves_are_allowed() -> None:
    check_batch_size(1)
    check_batch_size(MAX_BATCH_SIZE)


async def test_results_arrive_as_they_end_and_the_places_are_never_exceeded() -> None:
    work = Work()
    async with aclosing(batch_answers(GENERATIONS, work.perform, asyncio.Semaphore(2))) as answers:
        found = []
        for name in ("1", "2", "0", "3", "4", "5"):
            work.end(name)
            answer = await anext(answers)
            found.append((answer.index, answer.response.request_id))
            assert len(work.running) <= 2
        assert await anext(answers, None) is None
    assert found == [(int(name), name) for name in "120345"]
    assert work.begun == [each.text for each in GENERATIONS], "they begin in order"


async def test_a_generation_that_fails_is_its_own_result() -> None:
    work = Work()
    error: ServiceError = ResourceExhausted("full", metadata={"limit": "3"}, retry_after_seconds=2.5)
    work.errors["1"] = error
    work.end(*work.may_end)
    answers = {
        each.index: each async for each in batch_answers(GENERATIONS, work.perform, asyncio.Semaphore(9))
    }
    assert sorted(answers) == list(range(len(GENERATIONS)))
    failed = answers.pop(1).error
    assert (failed.code, failed.message, failed.reason) == (8, "full", "OVERLOADED")
    assert (dict(failed.metadata), failed.retry_after_seconds) == ({"limit": "3"}, 2.5)
    assert all(each.HasField("response") for each in answers.values())


async def test_a_defect_ends_the_whole_batch() -> None:
    work = Work()
    work.errors["2"] = RuntimeError("a defect")
    work.end("2")
    with pytest.raises(RuntimeError, match="a defect"):
        async for _ in batch_answers(GENERATIONS, work.perform, asyncio.Semaphore(9)):
            pass
    assert work.running == set()


async def test_a_cancellation_ends_running_requests_and_starts_no_others() -> None:
    work = Work()
    async with aclosing(batch_answers(GENERATIONS, work.perform, asyncio.Semaphore(2))) as answers:
        work.end("0")
        await anext(answers)
    assert work.running == set()
    assert len(work.begun) < len(GENERATIONS)
