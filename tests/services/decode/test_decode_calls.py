"""When a decode worker promises to take the blocks of a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from unittest.mock import Mock

import pytest

from quire.engine.errors import RequestTooLongError
from quire.kvindex.kv_layout import KvLayout
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.errors import InvalidArgument
from quire.services.decode.calls import DecodeCalls
from quire.services.decode.tickets import Tickets
from quire.services.worker.parts import WorkerParts
from quire.services.worker.state import WorkerState

LAYOUT = KvLayout(1, 1, 16, 8, "float32", "tiny", "float32", "float32-1")
SECONDS = 20.0


class BusyEngine:
    """An engine in a step that never ends, so that it runs no command."""

    def __init__(self) -> None:
        self.subscribe = self.unsubscribe = self.post = Mock()
        self.is_subscribed, self.check = Mock(return_value=False), Mock()
        self.has_commands = asyncio.Event()

    async def call_when_read(self, block_hashes: object, command: object) -> None:
        self.has_commands.set()
        await asyncio.Event().wait()


def called(
    make_parts: Callable[..., WorkerParts], engine: BusyEngine
) -> AsyncGenerator[worker_pb2.DecodeResponse]:
    """Call a decode worker, whose prompt another worker computes."""
    parts = make_parts(
        identity=Mock(vocab_size=100, layout=LAYOUT, root_hash=lambda scope: bytes(16)),
        address=lambda: "127.0.0.1:1",
        engine=engine,
        state=WorkerState("decode"),
    )
    tickets = Tickets(parts.engine, parts.memory, LAYOUT, "epoch")
    sequence = worker_pb2.Sequence(
        sequence_id="r",
        token_ids=range(2, 34),
        sampling=pb.SamplingParams(temperature=1.0, top_p=1.0, seed=7),
        stopping=pb.StoppingParams(max_tokens=4),
    )
    request = worker_pb2.DecodeRequest(sequence=sequence, remote_prefill=True)
    return DecodeCalls(parts, tickets).decode(request, Mock(time_remaining=lambda: None))


async def test_the_promise_does_not_wait_for_the_engine(make_parts: Callable[..., WorkerParts]) -> None:
    decoding = called(make_parts, engine := BusyEngine())
    response = await asyncio.wait_for(anext(decoding), SECONDS)
    assert response.accepted.ticket.receiver_epoch == "epoch"
    going_on = asyncio.ensure_future(anext(decoding))
    await asyncio.wait_for(engine.has_commands.wait(), SECONDS)
    going_on.cancel()
    await asyncio.gather(going_on, return_exceptions=True)


async def test_a_request_that_can_never_fit_gets_no_promise(make_parts: Callable[..., WorkerParts]) -> None:
    engine = BusyEngine()
    engine.check.side_effect = RequestTooLongError("too long")
    with pytest.raises(InvalidArgument, match="token_ids: too long"):
        await asyncio.wait_for(anext(called(make_parts, engine)), SECONDS)
