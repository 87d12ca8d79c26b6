"""The client of a pull, against a holder that follows a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import ProtocolError, PullFailedError, TransferError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.pull_client import BlockPull, Holder
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool

WAIT_SECONDS = 10.0
LAYOUT = KvLayout(1, 1, 4, 8, "float16", "model", "float16", "float32-1")
EPOCH = "epoch"
NUM_BLOCKS = 4
HASHES = [bytes([index]) * 16 for index in range(NUM_BLOCKS)]


def block(index: int, num_bytes: int = LAYOUT.block_bytes) -> Frame:
    return Frame(index, HASHES[index % NUM_BLOCKS], bytes([index]) * num_bytes)


class ScriptedHolder(kvtransfer_pb2_grpc.KvPullServiceServicer):
    """Pins and sends what the test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.num_pinned = NUM_BLOCKS
        self.expires_in_ms = 5000
        self.messages: Sequence[Sequence[Frame]] = [[block(index)] for index in range(NUM_BLOCKS)]
        self.never_ends = False
        self.requests: list[Any] = []
        self.renewals: asyncio.Queue[str] = asyncio.Queue()
        self.released: list[str] = []
        self.pull_ended = asyncio.Event()

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        self.requests.append(request)
        return pb.PinResponse(lease_id="lease", num_blocks=self.num_pinned, expires_in_ms=self.expires_in_ms)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[pb.PullResponse]:
        self.requests.append(request)
        try:
            for message in self.messages:
                response = pb.PullResponse()
                frames.add_to(response.frames, message)
                yield response
            if self.never_ends:
                await asyncio.Event().wait()
        finally:
            self.pull_ended.set()

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        self.renewals.put_nowait(request.lease_id)
        return pb.RenewResponse()

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.released.append(request.lease_id)
        return pb.ReleaseResponse()


class Setup:
    """A running holder, and the channels to it."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.server, self.holder, self.channels = server, ScriptedHolder(), ChannelPool()
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server(self.holder, server)

    def pull(self, timeout: float = WAIT_SECONDS) -> BlockPull:
        holder = Holder(self.address, EPOCH)
        return BlockPull(self.channels, holder, layout=LAYOUT, block_hashes=HASHES, timeout=timeout)

    async def num_open(self) -> int:
        """Return how many channels are in use: those that are not are closed first."""
        self.channels._clock = lambda: float("inf")
        await self.channels.close_unused()
        return len(self.channels)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    server = grpc.aio.server()
    running = Setup(server)
    await server.start()
    yield running
    await running.channels.close()
    await server.stop(None)


async def read(pull: BlockPull, first_block: int = 0) -> list[Frame]:
    return [frame async for message in pull.frames(first_block) for frame in message]


async def test_it_requests_the_pinned_blocks_and_releases_them(setup: Setup) -> None:
    setup.holder.messages = [[block(1), block(2)], [block(3)]]
    async with setup.pull() as pull:
        assert await read(pull, first_block=1) == [block(1), block(2), block(3)]
        assert setup.holder.released == []
    pin, pulled = setup.holder.requests
    assert (pin.holder_epoch, list(pin.block_hashes)) == (EPOCH, HASHES)
    assert (pulled.lease_id, pulled.first_block, pulled.num_blocks) == ("lease", 1, 3)
    assert setup.holder.released == ["lease"]
    assert await setup.num_open() == 0


async def test_a_holder_that_pins_more_than_it_was_asked_for_sends_no_more(setup: Setup) -> None:
    setup.holder.num_pinned = NUM_BLOCKS + 1
    setup.holder.messages = [[block(index) for index in range(NUM_BLOCKS + 1)]]
    async with setup.pull() as pull:
        assert pull.num_blocks == NUM_BLOCKS
        with pytest.raises(ProtocolError, match=f"block {NUM_BLOCKS} arrived"):
            await read(pull)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "4 of 4 blocks did not arrive"),
        ([[block(0)], [block(1), block(2)]], "1 of 4 blocks did not arrive"),
        ([[block(1)]], "block 1 arrived when block 0 was due"),
        ([[block(0)], [block(0)]], "block 0 arrived when block 1 was due"),
        ([[block(0, LAYOUT.block_bytes - 1)]], "block 0 has 127 bytes, not 128"),
        ([[Frame(0, HASHES[1], block(0).payload)]], "not the block that was asked for"),
    ],
)
async def test_blocks_that_break_the_order_are_refused(
    setup: Setup, messages: list[list[Frame]], problem: str
) -> None:
    setup.holder.messages = messages
    with pytest.raises(TransferError, match=problem):
        async with setup.pull() as pull:
            await read(pull)
    assert setup.holder.released == ["lease"]
    assert await setup.num_open() == 0


async def test_the_lease_is_renewed_while_the_pull_lasts(setup: Setup) -> None:
    setup.holder.expires_in_ms = 300
    async with setup.pull(), asyncio.timeout(WAIT_SECONDS):
        assert [await setup.holder.renewals.get() for _ in range(3)] == ["lease"] * 3


async def test_nothing_pinned_is_nothing_to_release(setup: Setup) -> None:
    setup.holder.num_pinned = 0
    async with setup.pull() as pull:
        assert pull.num_blocks == 0
    assert setup.holder.released == []
    assert await setup.num_open() == 0


async def test_an_unreachable_holder_releases_its_channel(setup: Setup) -> None:
    await setup.server.stop(None)
    with pytest.raises(PullFailedError) as failed:
        async with setup.pull():
            pass
    assert failed.value.status is grpc.StatusCode.UNAVAILABLE
    assert await setup.num_open() == 0


async def test_a_holder_that_takes_too_long_is_given_up(setup: Setup) -> None:
    setup.holder.messages, setup.holder.never_ends = [], True
    with pytest.raises(PullFailedError) as late:
        async with setup.pull(timeout=0.2) as pull:
            await read(pull)
    assert late.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_release_that_fails_is_no_error(setup: Setup) -> None:
    async with setup.pull() as pull:
        blocks = await read(pull)
        await setup.server.stop(None)
    assert len(blocks) == NUM_BLOCKS


async def test_closing_a_pull_early_ends_the_call(setup: Setup) -> None:
    setup.holder.never_ends = True
    async with setup.pull() as pull:
        messages = pull.frames()
        await anext(messages)
        await messages.aclose()
        await asyncio.wait_for(setup.holder.pull_ended.wait(), WAIT_SECONDS)
