"""What a prefill worker offers to push, and what it does about a push that is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import grpc
import pytest
import torch
from prometheus_client import CollectorRegistry

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.kv_layout import KvLayout, KvShape
from quire.kvtransfer.errors import PushFailedError
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.protos import inference_pb2 as pb
from quire.protos import kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2
from quire.rpc.channels import ChannelPool
from quire.rpc.server import Service, grpc_server
from quire.sampling.params import SamplingParams
from quire.services.prefill.calls import PrefillCalls
from quire.services.worker.blocks.block_reader import BlockReader
from quire.services.worker.parts import WorkerParts
from quire.services.worker.state import WorkerState

LAYOUT = KvLayout(1, 1, 16, 8, "float32", "tiny", "float32", "float32-1")
NUM_TOKENS = 2 * LAYOUT.block_size


class Receiver(kvtransfer_pb2_grpc.KvTransferServiceServicer):
    """Keeps what is offered first, and the seconds that the push may take."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.offer: asyncio.Future[kvtransfer_pb2.PushOpen] = asyncio.get_running_loop().create_future()

    async def Push(self, request_iterator: Any, context: Any) -> AsyncIterator[kvtransfer_pb2.PushResponse]:
        self.seconds = context.time_remaining()
        self.offer.set_result((await anext(request_iterator)).open)
        await asyncio.Event().wait()
        yield kvtransfer_pb2.PushResponse()


class QuickEngine:
    """Has drawn the first token before its caller hears that the sequence was added."""

    def __init__(self) -> None:
        self.subscribe = Mock()
        self.is_subscribed = Mock(return_value=False)
        self.unsubscribe = self.post = Mock()

    async def call(self, command: Callable[[Any], None]) -> None:
        engine = Mock()
        command(engine)
        engine.add_request.call_args.args[0].token_ids.append(7)


async def pushed(make_parts: Callable[..., WorkerParts], seconds: float | None) -> Receiver:
    """Return a receiver after a call that may take this many seconds has begun to push."""
    receiver = Receiver()
    service = Service(
        kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server, receiver, "quire.v1.KvTransferService"
    )
    async with grpc_server([service], registry=CollectorRegistry(), grace_seconds=0) as server:
        channels = ChannelPool()
        parts = make_parts(
            identity=Mock(vocab_size=100, layout=LAYOUT, root_hash=lambda scope: bytes(16)),
            engine=QuickEngine(),
            memory=Mock(shape=LAYOUT),
            blocks=Mock(block_size=LAYOUT.block_size),
            transports=MESSAGES_ONLY,
            channels=channels,
            state=WorkerState("prefill"),
        )
        request = worker_pb2.PrefillRequest(
            sequence=worker_pb2.Sequence(
                sequence_id="r",
                token_ids=range(2, 2 + NUM_TOKENS),
                sampling=pb.SamplingParams(temperature=1.0, top_p=1.0, seed=7),
                stopping=pb.StoppingParams(max_tokens=4),
            ),
            ticket=kvtransfer_pb2.Ticket(ticket_id="t", address=server.address),
        )
        context = Mock(time_remaining=lambda: seconds)
        prefilling = asyncio.create_task(anext(PrefillCalls(parts).prefill(request, context)))
        async with asyncio.timeout(5):
            await receiver.offer
        prefilling.cancel()
        await asyncio.gather(prefilling, return_exceptions=True)
        await channels.close()
    return receiver


async def test_an_immediate_first_token_is_not_part_of_the_prompt(
    make_parts: Callable[..., WorkerParts],
) -> None:
    receiver = await pushed(make_parts, 10.0)
    assert receiver.offer.result().num_blocks == NUM_TOKENS // LAYOUT.block_size


# gRPC sends times of more than 1,000 s in units of 10 s, rounded up.
@pytest.mark.parametrize(("seconds", "received"), [(60.0, 60.0), (7195.0, 7200.0)])
async def test_a_push_has_the_deadline_of_its_call(
    make_parts: Callable[..., WorkerParts], seconds: float, received: float
) -> None:
    receiver = await pushed(make_parts, seconds)
    assert receiver.seconds is not None
    # gRPC rounds times up.
    assert received - 50 < receiver.seconds < received + 10


async def test_a_push_for_a_call_without_a_deadline_has_none(make_parts: Callable[..., WorkerParts]) -> None:
    receiver = await pushed(make_parts, None)
    assert receiver.seconds is None


class PoolEngine:
    """An engine of which only the pool is used."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool

    async def call(self, command: Callable[[Any], None]) -> None:
        command(self)


@pytest.mark.parametrize(
    ("status", "num_left"), [(grpc.StatusCode.DATA_LOSS, 1), (grpc.StatusCode.UNAVAILABLE, 3)]
)
async def test_blocks_that_are_damaged_in_memory_are_forgotten_with_those_after_them(
    make_parts: Callable[..., WorkerParts], status: grpc.StatusCode, num_left: int
) -> None:
    memory, pool = KvMemory(KvShape(1, 1, 4, 8, "float16"), 4, torch.device("cpu")), BlockPool(4)
    reader = BlockReader(memory, pool)
    sequence = Sequence("r", [2] * 13, 13, SamplingParams(), b"")
    sequence.block_table = pool.allocate(4)
    sequence.block_hashes = [bytes([index]) * 16 for index in range(3)]
    for index, block_hash in enumerate(sequence.block_hashes):
        pool.seal(
            sequence.block_table[index], block_hash, sequence.block_hashes[index - 1] if index else None
        )
        reader.frame(index, block_hash, sequence.block_table[index])
    memory.write(sequence.block_table[1], b"x" * memory.shape.block_bytes)
    parts = make_parts(
        identity=Mock(vocab_size=100), engine=PoolEngine(pool), blocks=reader, state=WorkerState("prefill")
    )
    push: Any = SimpleNamespace(run=AsyncMock(side_effect=PushFailedError(status, "scripted")))
    with pytest.raises(PushFailedError):
        await PrefillCalls(parts)._pushed(push, sequence)
    assert len(pool.look_up(sequence.block_hashes)) == num_left
