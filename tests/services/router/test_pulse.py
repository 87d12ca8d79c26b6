"""A worker that is late is told apart from one that has vanished."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from quire.protos import worker_pb2
from quire.services.router.execution.failures import WorkerCallFailed
from quire.services.router.execution.worker_calls import WorkerCalls
from quire.services.router.workers.membership import StaticMembership
from quire.services.router.workers.pulse import LATE_SECONDS, LEAST_LIMIT_SECONDS, Pulse
from quire.services.router.workers.silences import TICK_SECONDS
from quire.services.router.workers.worker import Worker
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import background
from tests.testing.manual_clock import ManualClock
from tests.testing.router_parts import free_charge
from tests.testing.until import until


def silences(pulse: Pulse, *lengths: float) -> list[bool]:
    """Return, for each silence, whether the worker seemed to have vanished before it ended."""
    stopped = []
    for length in lengths:
        pulse.wait(length)
        stopped.append(pulse.has_stopped)
        pulse.hear()
    return stopped


def test_a_punctual_worker_vanishes_soon() -> None:
    pulse = Pulse()
    assert silences(pulse, *[0.4] * 20, LEAST_LIMIT_SECONDS - 0.1) == [False] * 21
    assert silences(Pulse(), LEAST_LIMIT_SECONDS) == [True]


def test_a_worker_that_grows_slower_has_not_vanished() -> None:
    assert not any(silences(Pulse(), 0.4, 0.8, 1.5, 3.0, 5.0))


def test_an_outage_does_not_count_as_lateness() -> None:
    assert silences(Pulse(), 0.4, 10.0, 0.4, 2.0) == [False, True, False, True]


def test_past_lateness_is_forgotten() -> None:
    assert silences(Pulse(), 1.5, 3.0) == [False, False]
    assert silences(Pulse(), 1.5, *[0.4] * 50, 3.0)[-1]


class Unreachable:
    """Opens channels to workers; once cut off, new ones lead nowhere."""

    def __init__(self) -> None:
        self.is_cut_off = False

    def __call__(self, address: str, **options: Any) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel("127.0.0.1:1" if self.is_cut_off else address, **options)


async def two_workers(
    cluster: Any, clock: ManualClock, connect: Unreachable
) -> tuple[WorkerSet, Worker, Worker]:
    added = [await cluster.add(name, "decode", pause_before_token=0, is_quiet=True) for name in "ab"]
    membership = StaticMembership([worker.server.address for worker in added])
    workers = WorkerSet(membership, connect=connect, clock=clock)
    await workers.refresh()
    first, second = workers.live("decode")
    return workers, first, second


def pass_silently(workers: WorkerSet, clock: ManualClock, seconds: float, *punctual: Worker) -> None:
    """Let time pass in which only some workers report."""
    for _ in range(round(seconds / TICK_SECONDS)):
        clock.now += TICK_SECONDS
        for worker in punctual:
            worker.health.heard()
        workers.listen()


async def test_the_calls_of_a_silent_worker_end_without_suspects(cluster: Any) -> None:
    clock, connect = ManualClock(), Unreachable()
    workers, first, second = await two_workers(cluster, clock, connect)
    async with asyncio.timeout(20), background() as spawn, WorkerCalls("r", 0, spawn, free_charge()) as calls:
        sequence = worker_pb2.Sequence(sequence_id="r", token_ids=[5])
        calls.start(first, first.stub.Decode(worker_pb2.DecodeRequest(sequence=sequence)))
        assert (await calls.next()).message is not None
        connect.is_cut_off = True
        pass_silently(workers, clock, LATE_SECONDS + TICK_SECONDS, second)
        assert (first.health.has_symptom, workers.serving("decode")) == (True, [first, second])
        pass_silently(workers, clock, LEAST_LIMIT_SECONDS, second)
        assert workers.serving("decode") == [second]
        error = (await calls.next()).error
        assert error is not None
        assert not WorkerCallFailed(first, error).is_death
    await workers.close()


async def test_workers_that_are_silent_together_are_not_set_aside(cluster: Any) -> None:
    clock, connect = ManualClock(), Unreachable()
    workers, first, second = await two_workers(cluster, clock, connect)
    connect.is_cut_off = True
    pass_silently(workers, clock, 10 * LEAST_LIMIT_SECONDS)
    assert workers.serving("decode") == [first, second]
    await workers.close()


async def test_a_late_router_does_not_set_workers_aside(cluster: Any) -> None:
    clock, connect = ManualClock(), Unreachable()
    workers, first, second = await two_workers(cluster, clock, connect)
    clock.now += 100.0
    workers.listen()
    assert (first.health.has_symptom, second.health.has_symptom) == (False, False)
    await workers.close()


async def test_a_worker_that_can_be_reached_is_alive_without_reports(cluster: Any) -> None:
    clock = ManualClock()
    workers, first, second = await two_workers(cluster, clock, Unreachable())
    async with asyncio.timeout(20):
        pass_silently(workers, clock, LATE_SECONDS + TICK_SECONDS, second)
        assert first.health.has_symptom
        await until(lambda: not first.health.has_symptom)
    await workers.close()
