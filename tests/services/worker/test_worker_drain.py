"""A worker that is stopping takes nothing new."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.errors import Unavailable
from quire.services.worker.servicer import WorkerServicer

SEQUENCE = worker_pb2.Sequence(
    request_id="r",
    token_ids=[1, 2, 3],
    sampling=pb.SamplingParams(temperature=1.0, top_p=1.0, seed=7),
    stopping=pb.StoppingParams(max_tokens=4),
)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_are_sent_elsewhere(role: str) -> None:
    identity = Mock(vocab_size=100, root_hash=lambda scope: bytes(16))
    engine = Mock()
    servicer = WorkerServicer(identity, engine, *(Mock() for _ in range(9)))
    await servicer.drain()
    if role == "prefill":
        answer = servicer.Prefill(worker_pb2.PrefillRequest(sequence=SEQUENCE), Mock())
    else:
        answer = servicer.Decode(worker_pb2.DecodeRequest(sequence=SEQUENCE), Mock())
    with pytest.raises(Unavailable, match="stopping") as refused:
        await anext(answer)
    assert refused.value.reason == "DRAINING"
    engine.subscribe.assert_not_called()
