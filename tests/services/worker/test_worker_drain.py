"""An operator drains a worker, or it stops: what it says, and what it refuses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from unittest.mock import Mock, call

import pytest

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.decode.calls import DecodeCalls
from quire.services.prefill.calls import PrefillCalls
from quire.services.server.errors import Unavailable
from quire.services.worker.drain import Drain, DrainState
from quire.services.worker.parts import WorkerParts
from quire.services.worker.servicer import WorkerServicer

SEQUENCE = worker_pb2.Sequence(
    sequence_id="r",
    token_ids=[1, 2, 3],
    sampling=pb.SamplingParams(temperature=1.0, top_p=1.0, seed=7),
    stopping=pb.StoppingParams(max_tokens=4),
)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_are_sent_elsewhere(role: str, make_parts: Callable[..., WorkerParts]) -> None:
    engine = Mock()
    identity = Mock(vocab_size=100, root_hash=lambda scope: bytes(16))
    parts = make_parts(engine=engine, identity=identity, drain=Drain(Mock()))
    servicer = WorkerServicer(parts, PrefillCalls(parts), DecodeCalls(parts, Mock()))
    parts.drain.stop()
    assert servicer.is_stopping
    answer: AsyncGenerator[worker_pb2.PrefillResponse | worker_pb2.DecodeResponse, None]
    if role == "prefill":
        answer = servicer.Prefill(worker_pb2.PrefillRequest(sequence=SEQUENCE), Mock())
    else:
        answer = servicer.Decode(worker_pb2.DecodeRequest(sequence=SEQUENCE), Mock())
    with pytest.raises(Unavailable, match="stopping") as refused:
        await anext(answer)
    assert refused.value.reason == "DRAINING"
    engine.subscribe.assert_not_called()


def test_an_operator_drains_a_worker_and_takes_it_back() -> None:
    announce = Mock()
    drain = Drain(announce)
    found = []
    for is_draining in (True, True, False, False, True):
        drain.set_draining(is_draining)
        found.append((drain.is_draining, drain.is_stopping))
    assert found == [(True, False), (True, False), (False, False), (False, False), (True, False)]
    assert announce.mock_calls == [call(True), call(False), call(True)]


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_worker_that_stops_is_not_taken_back(is_draining: bool) -> None:
    announce = Mock()
    drain = Drain(announce)
    drain.stop()
    drain.set_draining(is_draining)
    assert drain.state is DrainState.STOPPING
    assert (drain.is_draining, drain.is_stopping) == (True, True)
    announce.assert_not_called()
