"""The queue of formats is fair among tenants, by the seconds of the compiler that each has used of late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from quire.services.worker.requests.format_queue import HALF_LIFE_SECONDS, FormatQueue
from tests.testing.manual_clock import ManualClock


@pytest.fixture
def queue(clock: ManualClock) -> Iterator[FormatQueue]:
    queue = FormatQueue(clock)
    yield queue
    queue.close()


class Jobs:
    """Makes jobs that note their names in the order in which they run, once they are released."""

    def __init__(self, clock: ManualClock) -> None:
        self.names: list[str] = []
        self.is_released = threading.Event()
        self._clock = clock

    def job(self, name: str, seconds: float = 1.0) -> Callable[[], str]:
        def run() -> str:
            assert self.is_released.wait(30)
            self._clock.now += seconds
            self.names.append(name)
            return name

        return run


async def enqueue(queue: FormatQueue, client: str, work: Callable[[], str]) -> asyncio.Task[str]:
    task = asyncio.create_task(queue.run(client, work))
    await asyncio.sleep(0)
    return task


async def test_a_newcomer_waits_only_for_the_format_under_way(queue: FormatQueue, clock: ManualClock) -> None:
    jobs = Jobs(clock)
    tasks = [await enqueue(queue, "a", jobs.job(f"a{index}")) for index in range(4)]
    tasks += [await enqueue(queue, "b", jobs.job(f"b{index}", 0.1)) for index in range(2)]
    jobs.is_released.set()
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert jobs.names == ["a0", "b0", "b1", "a1", "a2", "a3"]


async def test_tenants_with_equally_costly_formats_take_turns(queue: FormatQueue, clock: ManualClock) -> None:
    jobs = Jobs(clock)
    tasks = [await enqueue(queue, client, jobs.job(client)) for client in "aaaabbbb"]
    jobs.is_released.set()
    await asyncio.gather(*tasks)
    assert sorted(jobs.names[:2]) == sorted(jobs.names[2:4]) == sorted(jobs.names[4:6]) == ["a", "b"]


async def test_old_use_is_forgotten(queue: FormatQueue, clock: ManualClock) -> None:
    jobs = Jobs(clock)
    jobs.is_released.set()
    await queue.run("a", jobs.job("past", 8.0))
    clock.now += 4 * HALF_LIFE_SECONDS
    await queue.run("b", jobs.job("past", 2.0))  # of the 8 seconds of a, less than 0.5 are left
    jobs.is_released.clear()
    first = await enqueue(queue, "c", jobs.job("c"))
    tasks = [first, *[await enqueue(queue, client, jobs.job(client)) for client in "ba"]]
    jobs.is_released.set()
    await asyncio.gather(*tasks)
    assert jobs.names[2:] == ["c", "a", "b"]


async def test_a_cancelled_request_is_removed_from_the_queue(queue: FormatQueue, clock: ManualClock) -> None:
    jobs = Jobs(clock)
    running = await enqueue(queue, "a", jobs.job("running"))
    waiting = await enqueue(queue, "b", jobs.job("waiting"))
    last = await enqueue(queue, "c", jobs.job("last"))
    for task in (running, waiting):
        task.cancel()
    await asyncio.wait([running, waiting])
    jobs.is_released.set()
    assert await last == "last"
    assert jobs.names == ["running", "last"]


async def test_an_error_of_a_format_reaches_its_request_only(queue: FormatQueue, clock: ManualClock) -> None:
    jobs = Jobs(clock)
    jobs.is_released.set()
    with pytest.raises(ValueError, match="7"):
        await queue.run("a", Mock(side_effect=ValueError(7)))
    assert await queue.run("a", jobs.job("next")) == "next"
