"""Requests whose outputs come in their worker's stream: order, failures, and what is left of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.protos import worker_pb2
from tests.testing.fake_worker import Cluster, FakeWorker, ids_of, stream
from tests.testing.until import until

WAIT_SECONDS = 10.0


@pytest.fixture(params=["d", "p"], ids=["one worker", "two workers"])
async def streaming(request: pytest.FixtureRequest, cluster: Cluster) -> tuple[Any, list[FakeWorker]]:
    """Return a client, and two decode workers."""
    decodes = [await cluster.add(name, "decode") for name in ("d1", "d2")]
    if request.param == "p":
        await cluster.add("p1", "prefill")
    stub = await cluster.start()
    return stub, decodes


def only_call(decodes: list[FakeWorker]) -> tuple[FakeWorker, worker_pb2.DecodeRequest]:
    """Return the only decode, and its worker."""
    ((worker, call),) = [(worker, call) for worker in decodes for call in worker.calls]
    return worker, call


async def test_a_call_that_ends_before_its_outputs_arrive_is_no_failure(
    streaming: Any, cluster: Cluster
) -> None:
    stub, decodes = streaming
    held: list[tuple[asyncio.Queue[Any], Any]] = []
    for worker in decodes:
        for stream_id, messages in worker.streams.items():
            slow: Any = asyncio.Queue()
            slow.put_nowait = lambda message, messages=messages: held.append((messages, message))
            worker.streams[stream_id] = slow
    answering = asyncio.create_task(stream(stub))
    await asyncio.wait([asyncio.create_task(w.ended.wait()) for w in decodes], return_when="FIRST_COMPLETED")
    for messages, message in held:
        messages.put_nowait(message)
    responses = await asyncio.wait_for(answering, WAIT_SECONDS)
    assert ids_of(responses) == cluster.script.answer
    assert responses[-1].usage.retries == 0


@pytest.mark.parametrize("loses_call", [True, False], ids=["call lost", "stream lost"])
async def test_a_lost_request_continues_on_the_other_worker(
    streaming: Any, cluster: Cluster, loses_call: bool
) -> None:
    stub, decodes = streaming
    for worker in decodes:
        worker.pause_before_token = 2
    answering = asyncio.create_task(stream(stub))
    await asyncio.wait([asyncio.create_task(w.paused.wait()) for w in decodes], return_when="FIRST_COMPLETED")
    lost, _ = only_call(decodes)
    (other,) = [worker for worker in decodes if worker is not lost]
    other.pause_before_token = None
    if loses_call:
        await lost.server.stop()
    else:
        for messages in list(lost.streams.values()):
            messages.put_nowait(None)
    responses = await asyncio.wait_for(answering, WAIT_SECONDS)
    assert ids_of(responses) == cluster.script.answer
    assert responses[-1].usage.retries == 1
    if not loses_call:
        await asyncio.wait_for(lost.aborted.wait(), WAIT_SECONDS)


async def test_a_stream_that_was_lost_is_opened_again(streaming: Any, cluster: Cluster) -> None:
    stub, decodes = streaming
    assert cluster.running is not None
    workers, old = cluster.running.workers, {each for worker in decodes for each in worker.streams}
    for worker in decodes:
        for messages in list(worker.streams.values()):
            messages.put_nowait(None)
    async with asyncio.timeout(WAIT_SECONDS):
        await until(lambda: not any(worker.streams.keys() & old for worker in decodes))
        assert ids_of(await stream(stub)) == cluster.script.answer
        await until(lambda: len(workers.serving("decode")) == len(decodes))
