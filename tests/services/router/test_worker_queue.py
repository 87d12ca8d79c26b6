"""Requests wait for a worker, in their order of arrival, as long as their deadlines allow."""

from __future__ import annotations

import asyncio
import gc
import math
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
from prometheus_client import CollectorRegistry, Gauge

from quire.client import AsyncClient
from quire.client.errors import QuireError, from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.errors import DRAINING, Unavailable
from quire.rpc.health import STOPPING
from quire.services.router.app import _end_waits, router
from quire.services.router.config import RouterConfig
from quire.services.router.execution.generation import MAX_RETRIES
from quire.services.router.workers.queue import Work, WorkerQueue
from tests.testing.fake_worker import ids_of
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

SECONDS = 10.0
WAITING = "quire_router_requests_waiting"


class Workers:
    """A decode worker that is there or not."""

    def __init__(self, *, is_there: bool = False) -> None:
        self.is_there = is_there


def queue_of(workers: Workers, max_wait_seconds: float = SECONDS) -> WorkerQueue:
    waiting = Gauge("waiting", "", registry=CollectorRegistry())
    return WorkerQueue(lambda _: workers.is_there, max_wait_seconds=max_wait_seconds, waiting=waiting)


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_answer_that_waits_for_its_own_workers_delays_no_other_request() -> None:
    present = {b""}
    waiting = Gauge("waiting", "", registry=CollectorRegistry())
    queue = WorkerQueue(present.__contains__, max_wait_seconds=SECONDS, waiting=waiting)
    begun = asyncio.create_task(queue.turn(1.0, math.inf, Work(descriptor=b"old")))
    await settle()
    await queue.turn(2.0, math.inf)
    queue.wake()
    await settle()
    assert not begun.done()
    present.add(b"old")
    queue.wake()
    await begun


async def test_the_oldest_request_gets_the_worker_first() -> None:
    workers, admitted = Workers(), list[float]()
    queue = queue_of(workers)

    async def ask(arrival: float) -> None:
        await queue.turn(arrival, math.inf)
        admitted.append(arrival)

    asking = [asyncio.create_task(ask(arrival)) for arrival in (3.0, 1.0, 2.0)]
    await settle()
    queue.wake()
    await settle()
    assert admitted == []
    workers.is_there = True
    queue.wake()
    # It comes when the others have been woken and have not run yet.
    await asyncio.gather(ask(4.0), *asking)
    assert admitted == [1.0, 2.0, 3.0, 4.0]


async def test_tenants_get_the_worker_in_turn() -> None:
    workers, admitted = Workers(), list[str]()
    queue = queue_of(workers)

    async def ask(arrival: float, work: Work) -> None:
        await queue.turn(arrival, math.inf, work)
        admitted.append(f"{work.tenant}{arrival:.0f}")

    flood = [ask(arrival, Work("flood", 10)) for arrival in range(4)]
    small = [ask(arrival, Work("small", 10)) for arrival in (4, 5)]
    heavy = [ask(arrival, Work("heavy", 30, 2)) for arrival in (6, 7)]
    asking = [asyncio.create_task(each) for each in (*flood, *small, *heavy)]
    await settle()
    workers.is_there = True
    queue.wake()
    await asyncio.gather(*asking)
    assert admitted == ["flood0", "small4", "heavy6", "flood1", "small5", "heavy7", "flood2", "flood3"]


async def test_with_a_worker_nothing_waits() -> None:
    await queue_of(Workers(is_there=True), max_wait_seconds=0.0).turn(1.0, math.inf)


@pytest.mark.parametrize(("max_wait_seconds", "seconds"), [(0.0, math.inf), (SECONDS, 0.0)])
async def test_the_wait_is_limited_by_the_setting_and_the_deadline(
    max_wait_seconds: float, seconds: float
) -> None:
    async with asyncio.timeout(SECONDS / 2):
        with pytest.raises(TimeoutError):
            await queue_of(Workers(), max_wait_seconds).turn(1.0, seconds)


async def test_a_cancelled_request_delays_no_other() -> None:
    workers = Workers()
    queue = queue_of(workers)
    older, newer = (asyncio.create_task(queue.turn(arrival, math.inf)) for arrival in (1.0, 2.0))
    await settle()
    workers.is_there = True
    older.cancel()
    await asyncio.wait_for(newer, SECONDS)
    assert older.cancelled()


async def stream(stub: Any, name: str, seconds: float = SECONDS) -> list[pb.GenerateStreamResponse]:
    generation = pb.Generation(text="say", request_id=name)
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=generation), timeout=seconds)
    return [response async for response in call]


async def gone(cluster: Any, worker: Any) -> None:
    """Let a worker say that it does not serve once the router has served, and wait until the router knows."""
    async with asyncio.timeout(SECONDS):
        await cluster.running.has_served.wait()
        await worker.begin_to_stop()
        await until(lambda: not cluster.running.workers.live("decode"))


async def until_waiting(cluster: Any, number: int) -> None:
    await until(lambda: cluster.metric(WAITING) == number)


async def test_requests_wait_and_reach_the_worker_in_their_order(cluster: Any) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start(worker_wait_seconds=SECONDS)
    await gone(cluster, worker)
    asking = []
    for number in range(3):
        asking.append(asyncio.create_task(stream(stub, f"r{number}")))
        await until_waiting(cluster, number + 1)
    await worker.serve_again()
    for responses in await asyncio.gather(*asking):
        assert ids_of(responses) == cluster.script.answer
        assert responses[-1].usage.retries == 0
    assert [call.sequence.sequence_id[:2] for call in worker.calls] == ["r0", "r1", "r2"]
    assert cluster.metric(WAITING) == 0


async def test_a_channel_does_not_repeat_a_request_that_has_waited(cluster: Any) -> None:
    worker = await cluster.add("d", "decode")
    await cluster.start(worker_wait_seconds=0.05)
    await gone(cluster, worker)
    async with AsyncClient(cluster.running.address) as client:
        with pytest.raises(QuireError, match="drain d --undo"):
            await client.generate([5], max_tokens=1)
        with pytest.raises(QuireError, match="drain d --undo"):
            await anext(client.stream([5], max_tokens=1))
    for method in ("Generate", "GenerateStream"):
        labels = {"grpc_method": method, "grpc_code": "UNAVAILABLE"}
        assert cluster.metric("grpc_server_handled_total", **labels) == 1


async def test_a_disconnect_frees_the_place(cluster: Any) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start(worker_wait_seconds=SECONDS, max_requests=1)
    await gone(cluster, worker)
    leaving = asyncio.create_task(stream(stub, "leaves"))
    await until_waiting(cluster, 1)
    await error_of(stream(stub, "too many"), grpc.StatusCode.RESOURCE_EXHAUSTED)
    leaving.cancel()
    await until_waiting(cluster, 0)
    await until(lambda: not cluster.metric("quire_router_requests_running"))
    asking = asyncio.create_task(stream(stub, "stays"))
    await until_waiting(cluster, 1)
    await worker.serve_again()
    assert ids_of(await asking) == cluster.script.answer


@pytest.mark.parametrize(
    ("wait", "seconds", "code", "reason"),
    [
        (0.0, SECONDS, grpc.StatusCode.UNAVAILABLE, DRAINING),
        (0.1, SECONDS, grpc.StatusCode.UNAVAILABLE, DRAINING),
        (SECONDS, 0.3, grpc.StatusCode.DEADLINE_EXCEEDED, None),
    ],
)
async def test_the_error_without_a_worker_has_the_reason(
    cluster: Any, wait: float, seconds: float, code: grpc.StatusCode, reason: str | None
) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start(worker_wait_seconds=wait)
    await gone(cluster, worker)
    caught = await error_of(stream(stub, "r", seconds), code)
    # gRPC itself ends a call at its deadline, and gives no reason.
    assert from_rpc_error(caught).reason in (reason, "DEADLINE_EXCEEDED")
    await until_waiting(cluster, 0)


async def test_requests_wait_for_the_first_worker(cluster: Any) -> None:
    worker = await cluster.add("d", "decode")
    await worker.begin_to_stop()
    starting = asyncio.create_task(cluster.start(worker_wait_seconds=SECONDS))
    await until(lambda: cluster.running is not None)
    async with grpc.aio.insecure_channel(cluster.running.address) as channel:
        asking = asyncio.create_task(stream(pb_grpc.GenerationServiceStub(channel), "r"))
        await until_waiting(cluster, 1)
        await worker.serve_again()
        assert ids_of(await asking) == cluster.script.answer
    await starting


async def test_failures_without_another_worker_use_up_no_retries(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only worker refuses more often than a request is retried; each time it answers the next probe."""
    worker = await cluster.add("d", "decode")

    async def refuse(count: int) -> None:
        if len(worker.calls) <= 2 * MAX_RETRIES:
            raise Unavailable("this worker is stopping", reason=DRAINING)

    monkeypatch.setattr(worker, "_before_token", refuse)
    responses = await stream(await cluster.start(), "r")
    assert ids_of(responses) == cluster.script.answer
    assert responses[-1].usage.retries == 2 * MAX_RETRIES


@pytest.mark.slow
async def test_a_worker_that_refused_gets_nothing_until_it_has_answered(cluster: Any, fault: Any) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start(worker_wait_seconds=SECONDS)
    worker.answers_probes.clear()
    worker.fault = fault(0, Unavailable("not now", reason="ENGINE_STOPPED"))
    asking = asyncio.create_task(stream(stub, "r"))
    await until(lambda: worker.calls)
    await until_waiting(cluster, 1)
    assert len(worker.calls) == 1
    assert cluster.running.workers.serving("decode") == []
    worker.answers_probes.set()
    assert ids_of(await asking) == cluster.script.answer
    assert len(worker.calls) == 2


@pytest.mark.parametrize("has_joined", [True, False])
async def test_a_router_that_stops_does_not_wait_for_a_worker_that_nothing_announces(
    cluster: Any, has_joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await cluster.add("d", "decode")
    if not has_joined:
        await worker.server.report(STOPPING)
    addresses = (worker.server.address,)
    config = RouterConfig(port=0, metrics_port=0, worker_addresses=addresses, poll_seconds=0.05)
    async with asyncio.timeout(SECONDS), router(config) as running:
        if has_joined:
            await running.has_served.wait()
        # It ends, and its lease too: the list of workers is empty.
        membership = running.workers._membership
        monkeypatch.setattr(membership, "members", AsyncMock(return_value=[]))
        await worker.begin_to_stop()
        await until(lambda: not (running.workers.all() or running.workers.expects_workers))
        async with grpc.aio.insecure_channel(running.address) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            asking = asyncio.create_task(stream(stub, "r"))
            await until(lambda: running.metrics.registry.get_sample_value(WAITING) == 1)
            await running.finish()
            error = from_rpc_error(await error_of(asking, text="no decode worker takes requests"))
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, DRAINING)


async def test_a_router_that_stops_before_a_worker_joined_reports_no_lost_error() -> None:
    loop, reports = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    _end_waits(loop.create_future())
    gc.collect()
    assert not reports


async def test_a_router_that_stops_serves_those_that_wait(cluster: Any) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start(worker_wait_seconds=SECONDS)
    await gone(cluster, worker)
    asking = asyncio.create_task(stream(stub, "r"))
    await until_waiting(cluster, 1)
    finishing = asyncio.create_task(cluster.running.finish())
    await settle()
    await error_of(stream(stub, "late"), text="this router is stopping")
    assert not finishing.done()
    await worker.serve_again()
    assert ids_of(await asking) == cluster.script.answer
    await asyncio.wait_for(finishing, SECONDS)
