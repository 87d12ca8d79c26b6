"""A worker that stops refuses new requests, and lets the running ones end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any
from unittest.mock import Mock

import pytest

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.ended_calls import end_of
from quire.rpc.errors import Unavailable
from quire.services.decode.calls import DecodeCalls
from quire.services.prefill.calls import PrefillCalls
from quire.services.worker.lifecycle import drain as drain_module
from quire.services.worker.lifecycle.drain import drain_before_exit
from quire.services.worker.parts import WorkerParts
from quire.services.worker.servicer import WorkerServicer
from quire.services.worker.state import WorkerState
from tests.testing.until import until

SEQUENCE = worker_pb2.Sequence(
    sequence_id="r",
    token_ids=[1, 2, 3],
    sampling=pb.SamplingParams(temperature=1.0, top_p=1.0, seed=7),
    stopping=pb.StoppingParams(max_tokens=4),
)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_are_sent_elsewhere(role: str, make_parts: Callable[..., WorkerParts]) -> None:
    engine = Mock()
    identity = Mock(vocab_size=100, root_hash=lambda scope: bytes(16), layout=Mock(block_size=16))
    parts = make_parts(engine=engine, identity=identity, state=WorkerState("decode"))
    servicer = WorkerServicer(parts, PrefillCalls(parts).prefill, DecodeCalls(parts, Mock()).decode)
    parts.state.stop()
    answer: AsyncGenerator[worker_pb2.PrefillResponse | worker_pb2.DecodeResponse, None]
    if role == "prefill":
        answer = servicer.Prefill(worker_pb2.PrefillRequest(sequence=SEQUENCE), Mock())
    else:
        answer = servicer.Decode(worker_pb2.DecodeRequest(sequence=SEQUENCE), Mock())
    with pytest.raises(Unavailable, match="stopping") as refused:
        await anext(answer)
    assert refused.value.reason == "DRAINING"
    engine.subscribe.assert_not_called()


def start_request() -> asyncio.Task[Any]:
    """Return the task of a request that runs until it is cancelled."""
    return asyncio.create_task(asyncio.Event().wait())


async def test_a_stopping_process_waits_for_running_requests() -> None:
    state, request = WorkerState("decode"), start_request()
    waiting = asyncio.create_task(
        drain_before_exit(state, lambda: [] if request.done() else [request], None, 0.0)
    )
    await asyncio.sleep(0)
    assert state.is_draining
    state.check_not_stopping()
    await until(lambda: state.is_stopping)
    with pytest.raises(Unavailable) as refused:
        state.check_not_stopping()
    assert refused.value.reason == "DRAINING"
    assert not waiting.done()
    request.cancel()
    await asyncio.wait_for(waiting, 5)


async def test_the_end_informs_each_caller_and_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain_module, "END_SECONDS", 0.01)
    ends, hangs = start_request(), start_request()
    # The client of the second does not read the message that is being sent.
    end_of(hangs).is_sending = True
    waiting = asyncio.create_task(
        drain_before_exit(
            WorkerState("decode"), lambda: [each for each in (ends, hangs) if not each.done()], None, 0.0
        )
    )
    for _ in range(3):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=5)
    assert (ends.done(), hangs.done()) == (True, False)
    error = end_of(hangs).error
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"
    hangs.cancel()
