"""Requests that are on workers when they die: who is tried again, and who is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.errors import (
    DRAINING,
    ENGINE_FAILED,
    REQUEST_FAILED,
    SUSPECTED,
    Internal,
    ServiceError,
    Unavailable,
)
from quire.services.router.execution.suspects import CLEARING_TOKENS, Suspects
from quire.services.router.outputs.answer_group import Death
from quire.services.router.workers.worker import Worker, WorkerConnection
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

DEATH = Unavailable("the engine has failed", reason=ENGINE_FAILED)
SECONDS = 10


async def ask(stub: Any) -> pb.GenerateResponse:
    generation = pb.Generation(text="say", request_id="test")
    response: pb.GenerateResponse = await stub.Generate(
        pb.GenerateRequest(generation=generation), timeout=SECONDS
    )
    return response


async def refusal(stub: Any) -> tuple[grpc.StatusCode, str, str]:
    """Ask for an answer that does not come; return the status, its reason and its message."""
    error = from_rpc_error(await error_of(ask(stub)))
    return error.code, error.reason, error.message


async def next_paused(cluster: Any) -> Any:
    """Return the worker that is the next to pause."""
    waits = {asyncio.create_task(w.paused.wait()): w for w in cluster.workers.values()}
    done, left = await asyncio.wait(waits, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
    for task in left:
        task.cancel()
    [paused] = done
    waits[paused].paused.clear()
    return waits[paused]


@pytest.fixture
async def five(cluster: Any) -> Any:
    """Five decode workers."""
    for number in range(5):
        await cluster.add(f"d{number}", "decode")
    return cluster


async def test_a_request_that_two_workers_died_with_is_refused(five: Any, fault: Callable[..., Any]) -> None:
    stub = await five.start()
    five.change(fault=fault(0, DEATH))
    code, reason, message = await refusal(stub)
    assert (code, reason) == (grpc.StatusCode.INTERNAL, SUSPECTED)
    assert "2 workers ended" in message
    assert len(five.calls()) == 2


async def test_a_broken_connection_is_a_death(five: Any) -> None:
    stub = await five.start()
    five.change(pause_before_token=0)
    asking = asyncio.create_task(refusal(stub))
    for _ in range(2):
        # What the server says to its calls is lost where the process is: only the connection breaks.
        await (await next_paused(five)).server._server.stop(None)
    assert (await asking)[:2] == (grpc.StatusCode.INTERNAL, SUSPECTED)
    assert len(five.calls()) == 2


async def end_stream_and_call(worker: Any) -> None:
    """End a worker's stream of outputs, and then the call that waits there, with the worker's fault."""
    [(old, messages)] = worker.streams.items()
    messages.put_nowait(None)
    # The router opens a new stream once it has read the end of the old one.
    await until(lambda: worker.streams.keys() - {old})
    worker.goes_on.set()


async def test_an_engine_that_fails_after_some_tokens_is_a_death(
    five: Any, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.services.router.execution.attempt.CALL_END_SECONDS", SECONDS)
    stub = await five.start()
    five.change(pause_before_token=2, fault=fault(2, DEATH))
    asking = asyncio.create_task(refusal(stub))
    for _ in range(2):
        await end_stream_and_call(await next_paused(five))
    assert (await asking)[:2] == (grpc.StatusCode.INTERNAL, SUSPECTED)
    assert len(five.calls()) == 2


async def test_workers_that_end_their_streams_as_they_stop_accuse_no_request(
    five: Any, fault: Callable[..., Any]
) -> None:
    stub = await five.start()
    five.change(pause_before_token=0, fault=fault(0))
    asking = asyncio.create_task(ask(stub))
    for _ in range(3):
        await end_stream_and_call(await next_paused(five))
    last = await next_paused(five)
    last.fault = None
    last.goes_on.set()
    assert list((await asking).choices[0].token_ids) == five.script.answer


@pytest.mark.parametrize(
    "error", [Unavailable("stopping", reason=DRAINING), Unavailable("stopped", reason="ENGINE_STOPPED")]
)
async def test_a_worker_that_refuses_or_drains_accuses_no_request(
    five: Any, fault: Callable[..., Any], error: ServiceError
) -> None:
    stub = await five.start()
    for name in ("d0", "d1", "d2"):
        five[name].fault = fault(0, error)
    assert list((await ask(stub)).choices[0].token_ids) == five.script.answer


async def test_a_worker_that_was_gone_before_accuses_no_request(five: Any) -> None:
    stub = await five.start(poll_seconds=60.0)
    for name in ("d0", "d1", "d2"):
        await five[name].server._server.stop(None)
    assert list((await ask(stub)).choices[0].token_ids) == five.script.answer


async def test_tokens_beyond_those_that_it_had_clear_a_suspect(five: Any, fault: Callable[..., Any]) -> None:
    five.script.answer = [*range(5, 5 + 3 * CLEARING_TOKENS + 2), 1]
    stub = await five.start()
    five.change(fault=fault(CLEARING_TOKENS, DEATH))
    response = await ask(stub)
    assert list(response.choices[0].token_ids) == five.script.answer
    assert response.usage.retries == 3


async def test_fewer_tokens_do_not(five: Any, fault: Callable[..., Any]) -> None:
    five.script.answer = [*range(5, 5 + 3 * CLEARING_TOKENS + 2), 1]
    stub = await five.start()
    five.change(fault=fault(CLEARING_TOKENS - 1, DEATH))
    assert (await refusal(stub))[1] == SUSPECTED


async def test_a_request_that_fails_by_itself_is_tried_once(five: Any, fault: Callable[..., Any]) -> None:
    stub = await five.start()
    five.change(fault=fault(1, Internal("OverflowError: scripted", reason=REQUEST_FAILED)))
    code, reason, message = await refusal(stub)
    assert (code, reason) == (grpc.StatusCode.INTERNAL, REQUEST_FAILED)
    assert message == "request test failed: OverflowError: scripted"
    assert len(five.calls()) == 1


def test_a_hang_is_a_death_only_as_long_as_it_lasts() -> None:
    worker = Worker("127.0.0.1:1", worker_pb2.GetWorkerInfoResponse(), cast(WorkerConnection, None))
    ended = Death.of(worker)
    worker.health.reported_stalled(True)
    hung = Death.of(worker)
    assert (ended.has_lasted, hung.has_lasted) == (True, True)
    worker.health.reported_stalled(False)
    assert (ended.has_lasted, hung.has_lasted) == (True, False)


async def test_suspects_take_turns_on_a_worker() -> None:
    suspects = Suspects()
    order: list[str] = []

    async def serve(name: str, goes_on: asyncio.Event) -> None:
        await suspects.turn(lambda: ["d"])
        with suspects.placed(["d"]) as clear:
            order.append(f"{name} begins")
            await goes_on.wait()
            clear()
            order.append(f"{name} is cleared")
            await asyncio.Event().wait()

    events = [asyncio.Event() for _ in range(3)]
    tasks = [asyncio.create_task(serve(str(at), event)) for at, event in enumerate(events)]
    for event in events:
        while len(order) % 2 == 0:
            await asyncio.sleep(0)
        event.set()
        while len(order) % 2:
            await asyncio.sleep(0)
    assert order == [f"{at} {what}" for at in range(3) for what in ("begins", "is cleared")]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not suspects.is_near("d")


async def test_suspects_wait_neither_without_a_healthy_worker_nor_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.services.router.execution.suspects.PATIENCE_SECONDS", 0.01)
    suspects = Suspects()
    with suspects.placed(["d"]):
        async with asyncio.timeout(SECONDS):
            await suspects.turn(lambda: [])
            await suspects.turn(lambda: ["d", "e"])
            await suspects.turn(lambda: ["d"])
