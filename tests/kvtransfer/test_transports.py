"""What every transport keeps: the bytes, the credit, the refusals, and what is left after a failure."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import (
    DigestMismatchError,
    ProtocolError,
    PullFailedError,
    PushFailedError,
    TransferError,
)
from quire.kvtransfer.frame import Transport
from quire.kvtransfer.layout import layout_to_proto
from quire.kvtransfer.transports.messages import Messages
from quire.kvtransfer.transports.nixl import NixlPools
from quire.kvtransfer.transports.shared import SharedPools
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from tests.testing.rpc_errors import error_of
from tests.testing.transport_pair import (
    ATTEMPT,
    LAYOUT,
    NUM_BLOCKS,
    RECEIVER_EPOCH,
    TICKET,
    WAIT_SECONDS,
    Pair,
    Target,
    hash_of,
    running_pair,
)

BLOCK = LAYOUT.block_bytes
FIRST_TOKEN = 42

HAS_NIXL = find_spec("nixl_cu12") is not None
NIXL = pytest.param(
    Transport.NIXL,
    marks=[pytest.mark.slow, pytest.mark.skipif(not HAS_NIXL, reason="the extra 'nixl' is not installed")],
)
TRANSPORTS = (Transport.MESSAGES, Transport.SHARED, NIXL)
PIECES = "messages, with a block in three pieces"


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages carry 3 blocks or name 4, and NIXL use the loopback device, which all machines have."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setattr(frames, "MESSAGE_BYTES", 3 * BLOCK)
    monkeypatch.setattr(frames, "NAMED_BYTES", 4 * BLOCK)


@pytest.fixture(params=[*TRANSPORTS, PIECES])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Transport:
    if request.param == PIECES:
        monkeypatch.setattr(frames, "PIECE_BYTES", 2 * BLOCK // 5)
        return Transport.MESSAGES
    kind: Transport = request.param
    return kind


@pytest.fixture
async def pair(transport: Transport, directory: Path) -> AsyncIterator[Pair]:
    async with running_pair(directory, transport, transport) as running:
        yield running


# --- what arrives -----------------------------------------------------------------------------------------


async def test_a_push_brings_the_bytes_and_is_counted(pair: Pair, transport: Transport) -> None:
    async with pair.push(20, first_block=3) as push:
        await push.send(pair.pool.prompt(3, 7))
        await push.send([])
        await push.send(pair.pool.prompt(7, 20))
        summary = await push.commit(FIRST_TOKEN)
    pair.transfers.record_push(summary)
    assert pair.target.held == pair.expected(3, 20)
    assert (pair.target.first_token_id, pair.target.reasons) == (FIRST_TOKEN, [])
    assert (summary.num_blocks, summary.num_bytes, summary.transport) == (17, 17 * BLOCK, transport)
    assert 0 <= summary.credit_wait_seconds <= summary.seconds
    for name in ("push_seconds_count", "credit_wait_seconds_count"):
        assert pair.sample(name) == 1
    assert pair.sample("transfer_blocks_total", direction="received") == 17
    for direction in ("sent", "received"):
        labels = {"direction": direction, "transport": transport}
        assert pair.sample("transfer_bytes_total", **labels) == 17 * BLOCK


async def test_a_pull_brings_the_bytes_and_is_counted(pair: Pair, transport: Transport) -> None:
    target = Target()
    async with pair.pull(10) as pull:
        assert len(pair.pool.pins) == 1, "the blocks are pinned while they are copied"
        await pair.pulled(pull, target)
        assert pull.transport == transport
    assert target.held == pair.expected(0, 10)
    assert pair.pool.pins == {}
    lent = pair.sample("transfer_bytes_total", direction="lent", transport=transport)
    assert lent == 10 * BLOCK


async def test_a_push_of_no_blocks_commits(pair: Pair) -> None:
    async with pair.push(4, first_block=4) as push:
        await push.send([])
        assert (await push.commit(FIRST_TOKEN)).num_blocks == 0
    assert pair.target.first_token_id == FIRST_TOKEN


async def test_the_partial_last_block_has_no_hash(pair: Pair) -> None:
    frame = pair.pool.frame(0, b"", pair.pool.place(0))
    pair.pool.digests[0] = frames.digest(b"", frame.payload)
    async with pair.push(1) as push:
        await push.send([pair.pool.frame(0, b"", pair.pool.place(0))])
        await push.commit(FIRST_TOKEN)
    assert pair.target.held == pair.expected(0, 1)


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=12)
@given(data=st.data(), window_blocks=st.integers(1, 9), num_blocks=st.integers(0, NUM_BLOCKS))
async def test_the_same_bytes_arrive_however_pushes_are_split(
    transport: Transport, data: st.DataObject, window_blocks: int, num_blocks: int
) -> None:
    first_block = data.draw(st.integers(0, num_blocks))
    cuts = data.draw(st.lists(st.integers(first_block, num_blocks), max_size=5))
    with tempfile.TemporaryDirectory(prefix="quire-") as path:
        async with running_pair(Path(path), transport, transport, window_blocks=window_blocks) as pair:
            written: list[int] = []
            pair.sink.before_write = written.append
            async with pair.push(num_blocks, first_block=first_block) as push:
                for start, end in pairwise(sorted([first_block, *cuts, num_blocks])):
                    await push.send(pair.pool.prompt(start, end))
                await push.commit(FIRST_TOKEN)
            assert written == list(range(first_block, num_blocks))
            assert pair.target.held == pair.expected(first_block, num_blocks)


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=12)
@given(
    num_blocks=st.integers(1, 20),
    num_sent=st.integers(0, 20),
    damaged=st.none() | st.integers(0, 19),
    leaves=st.booleans(),
)
async def test_a_push_is_admitted_whole_and_right_or_not_at_all(
    transport: Transport, num_blocks: int, num_sent: int, damaged: int | None, leaves: bool
) -> None:
    num_sent = min(num_sent, num_blocks)
    with tempfile.TemporaryDirectory(prefix="quire-") as path:
        async with running_pair(Path(path), transport, transport, window_blocks=4) as pair:
            if damaged is not None:
                pair.pool.flip_a_bit(damaged)
            with suppress(PushFailedError):
                async with pair.push(num_blocks) as push:
                    await push.send(pair.pool.prompt(0, num_sent))
                    if not leaves:
                        await push.commit(FIRST_TOKEN)
            await asyncio.wait_for(_ended(pair), WAIT_SECONDS)
            is_whole = num_sent == num_blocks and not leaves and (damaged is None or damaged >= num_sent)
            target = pair.sink.targets.get(TICKET)
            assert (target is not None and target.first_token_id == FIRST_TOKEN) == is_whole
            if target is not None:
                assert len(target.reasons) == (not is_whole)
                assert target.held.items() <= pair.expected(0, num_blocks).items()
                assert damaged is None or damaged not in target.held


async def _ended(pair: Pair) -> None:
    """Wait until the receiver's part of the push is over, if it has begun."""
    await pair.server.stop(WAIT_SECONDS)
    if (target := pair.sink.targets.get(TICKET)) is not None:
        await target.ended.wait()


# --- credit -----------------------------------------------------------------------------------------------


async def test_no_block_is_touched_before_the_receiver_has_room(pair: Pair) -> None:
    written: list[int] = []
    pair.sink.before_write = written.append
    pair.sink.allocates.clear()
    async with pair.push(6) as push:
        sending = asyncio.create_task(push.send(pair.pool.prompt(0, 6)))
        await asyncio.wait_for(pair.sink.waiting.wait(), WAIT_SECONDS)
        assert not sending.done()
        assert written == []
        pair.sink.allocates.set()
        await sending
        await push.commit(FIRST_TOKEN)
    assert written == list(range(6))


async def test_no_more_is_sent_than_the_window(pair: Pair) -> None:
    """The window has 8 blocks; the sender prepares at most one message beyond it."""
    prepared: list[int] = []
    pair.pool.before_frame = prepared.append
    may_write, is_writing = threading.Event(), threading.Event()

    def wait(index: int) -> None:
        is_writing.set()
        assert may_write.wait(WAIT_SECONDS)

    pair.sink.before_write = wait
    async with pair.push(NUM_BLOCKS) as push:
        sending = asyncio.create_task(push.send(pair.pool.prompt(0, NUM_BLOCKS)))
        await asyncio.to_thread(is_writing.wait, WAIT_SECONDS)
        await asyncio.sleep(0.05)
        assert len(prepared) <= 8 + 4
        assert not sending.done()
        may_write.set()
        await sending
        await push.commit(FIRST_TOKEN)
    assert pair.target.held == pair.expected(0, NUM_BLOCKS)


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"epoch": "receiver-0"}, {"attempt": ATTEMPT - 1}, {"ticket_id": "no"}])
async def test_a_push_of_another_epoch_attempt_or_ticket_is_refused(
    pair: Pair, changes: dict[str, Any]
) -> None:
    with pytest.raises(PushFailedError):
        async with pair.push(2, **changes) as push:
            await push.send(pair.pool.prompt(0, 2))
            await push.commit(FIRST_TOKEN)
    assert pair.sink.targets == {}


async def test_a_pull_of_another_epoch_is_refused(pair: Pair) -> None:
    with pytest.raises(PullFailedError, match="restarted"):
        async with pair.pull(2, epoch="sender-0"):
            pass
    assert pair.pool.pins == {}


async def test_a_push_of_bytes_that_changed_after_their_digest_is_refused(pair: Pair) -> None:
    pair.pool.flip_a_bit(5)
    with pytest.raises(PushFailedError) as refused:
        async with pair.push(8) as push:
            await push.send(pair.pool.prompt(0, 8))
            await push.commit(FIRST_TOKEN)
    assert refused.value.status is grpc.StatusCode.DATA_LOSS
    assert pair.target.first_token_id is None
    assert len(pair.target.reasons) == 1
    assert pair.sample("transfer_failures_total", kind="push", reason="digest_mismatch") == 1


async def test_a_pull_of_bytes_that_changed_after_their_digest_brings_those_before(pair: Pair) -> None:
    pair.pool.flip_a_bit(5)
    target = Target()
    async with pair.pull(8) as pull:
        with pytest.raises(DigestMismatchError):
            await pair.pulled(pull, target)
    assert 5 not in target.held
    assert target.held.items() <= pair.expected(0, 5).items()
    assert pair.pool.pins == {}


async def test_bytes_that_change_while_they_are_copied_are_refused(pair: Pair, transport: Transport) -> None:
    """A message has its own copy, and so has a READ. Of a shared pool the receiver's copy counts."""
    pair.sink.before_write = lambda index: pair.pool.flip_a_bit(index) if index == 2 else None
    expected = pair.expected(0, 4)
    if transport is not Transport.SHARED:
        async with pair.push(4) as push:
            await push.send(pair.pool.prompt(0, 4))
            await push.commit(FIRST_TOKEN)
        assert pair.target.held == expected
        return
    with pytest.raises(PushFailedError) as refused:
        async with pair.push(4) as push:
            await push.send(pair.pool.prompt(0, 4))
            await push.commit(FIRST_TOKEN)
    assert refused.value.status is grpc.StatusCode.DATA_LOSS


def opening(pair: Pair, num_blocks: int) -> pb.PushRequest:
    opened = pb.PushOpen(
        ticket_id=TICKET,
        receiver_epoch=RECEIVER_EPOCH,
        attempt=ATTEMPT,
        layout=layout_to_proto(LAYOUT),
        num_blocks=num_blocks,
        shared_pool=pair.sender.offer,
    )
    return pb.PushRequest(open=opened)


async def _ending(
    pair: Pair, transport: Transport, indices: range, **changes: Any
) -> tuple[grpc.StatusCode, str]:
    """Send blocks without waiting for credit; return how the receiver ends the call."""
    with pair.channels.peer(pair.address, RECEIVER_EPOCH) as peer:
        call: Any = kvtransfer_pb2_grpc.KvTransferServiceStub(peer).Push(timeout=WAIT_SECONDS)
    prompt = pair.pool.prompt(indices.start, indices.stop)
    message = frames.to_proto(prompt, transport)
    for name, value in changes.items():
        setattr(message.frames.frames[0], name, value)
    async with asyncio.timeout(WAIT_SECONDS):
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for each in (opening(pair, NUM_BLOCKS), message):
                await call.write(each)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                pass
        return await call.code(), await call.details()


@pytest.mark.parametrize("changes", [{"digest": 1}, {"block_hash": hash_of(77)}, {"index": 1}])
async def test_a_frame_that_is_not_right_is_refused(
    pair: Pair, transport: Transport, changes: dict[str, Any]
) -> None:
    code, _ = await _ending(pair, transport, range(1), **changes)
    assert code in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT)
    assert pair.target.held == {}


@pytest.mark.parametrize("block_id", [NUM_BLOCKS, 2**32 - 1])
async def test_a_block_beyond_the_pool_is_refused(directory: Path, block_id: int) -> None:
    async with running_pair(directory) as pair:
        code, details = await _ending(pair, Transport.SHARED, range(1), block_id=block_id)
        assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "block 0 is not in the sender's pool")


async def test_a_payload_where_a_place_was_agreed_is_refused(directory: Path) -> None:
    async with running_pair(directory) as pair:
        code, details = await _ending(pair, Transport.MESSAGES, range(1))
    assert code is grpc.StatusCode.INVALID_ARGUMENT, details


# --- ends -------------------------------------------------------------------------------------------------


async def test_after_an_abort_no_late_block_is_written(pair: Pair) -> None:
    """A thread is about to write when the push ends; the blocks are reused at once."""
    may_write, is_writing = threading.Event(), threading.Event()

    def wait(index: int) -> None:
        if index == 3:
            is_writing.set()
            assert may_write.wait(WAIT_SECONDS)

    pair.sink.before_write = wait
    async with pair.push(6) as push:
        await push.send(pair.pool.prompt(0, 6))
        await asyncio.to_thread(is_writing.wait, WAIT_SECONDS)
    await asyncio.wait_for(pair.target.ended.wait(), WAIT_SECONDS)
    pair.target.held.clear()  # others own the blocks now
    may_write.set()
    await pair.server.stop(WAIT_SECONDS)
    assert pair.target.held == {}
    assert pair.target.first_token_id is None


@pytest.mark.parametrize("num_sent", [0, 1, 6])
async def test_a_receiver_that_ends_at_any_step_fails_the_push(pair: Pair, num_sent: int) -> None:
    with pytest.raises(PushFailedError) as raised:
        async with pair.push(6) as push, asyncio.timeout(WAIT_SECONDS / 2):
            await push.send(pair.pool.prompt(0, num_sent))
            await pair.server.stop(None)
            await push.send(pair.pool.prompt(num_sent, 6))
            await push.commit(FIRST_TOKEN)
    assert raised.value.status in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
    assert [(each.first_token_id, len(each.reasons)) for each in pair.sink.targets.values()] in (
        [],
        [(None, 1)],
    )


async def test_a_holder_that_ends_in_mid_pull_fails_it(pair: Pair) -> None:
    target = Target()
    async with pair.pull(NUM_BLOCKS) as pull:
        await pair.server.stop(None)
        with pytest.raises(TransferError):
            await pair.pulled(pull, target)
    assert target.held.items() <= pair.expected(0, NUM_BLOCKS).items()


async def test_a_lease_that_expires_brings_an_error_and_no_wrong_block(pair: Pair) -> None:
    target = Target()

    def expire(index: int) -> None:
        if index == 7:
            for lease in list(pair.leases._leases):
                pair.leases.release(lease)

    pair.pool.before_frame = expire
    async with pair.pull(12) as pull:
        with pytest.raises(PullFailedError, match="the lease ended"):
            await pair.pulled(pull, target)
    assert target.held.items() <= pair.expected(0, 12).items()


async def test_roles_may_swap(transport: Transport, directory: Path) -> None:
    """The worker that took blocks sends some of its own to the one that sent them."""
    async with running_pair(directory, transport, transport) as pair:
        async with pair.push(2) as push:
            await push.send(pair.pool.prompt(0, 2))
            await push.commit(FIRST_TOKEN)
        if isinstance(pair.receiver, SharedPools):
            pair.receiver.share(RECEIVER_EPOCH, pair.pool.descriptor)
        if isinstance(pair.receiver, NixlPools):
            rows = pair.pool.rows
            pair.receiver.share(rows.ctypes.data, rows.nbytes)
        intake = await pair.sender.choose(pair.receiver.offer)
        assert intake.transport == transport


async def test_a_place_without_a_pool_is_an_error() -> None:
    """Messages that name a place are not taken by a receiver of payloads."""
    with pytest.raises((ProtocolError, DigestMismatchError)):
        list(Messages().frames([pb.BlockFrame(block_id=1, digest=frames.digest(b"", b""))], BLOCK))


@pytest.mark.parametrize("lost", range(4))
def test_without_one_of_its_pieces_a_block_does_not_arrive(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "PIECE_BYTES", 2 * BLOCK // 5)
    blocks = [frames.Frame(index, hash_of(index), bytes([index]) * BLOCK) for index in range(2)]
    pieces = [piece for block in blocks for piece in block.pieces(Transport.MESSAGES)]
    message = frames.to_proto(pieces).frames.frames
    assert list(Messages().frames(message, BLOCK)) == blocks
    assert frames.num_completed(message) == 2
    del message[lost]
    arrived: list[frames.Frame] = []
    with pytest.raises((ProtocolError, DigestMismatchError)):
        arrived.extend(Messages().frames(message, BLOCK))
    assert all(block in blocks for block in arrived)


@pytest.mark.parametrize(
    ("transport", "code"),
    [
        (pb.TRANSPORT_UNSPECIFIED, grpc.StatusCode.INVALID_ARGUMENT),
        (99, grpc.StatusCode.INVALID_ARGUMENT),
        (pb.TRANSPORT_NIXL, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
async def test_a_pull_by_a_transport_that_the_holder_does_not_have_is_refused(
    directory: Path, transport: Any, code: grpc.StatusCode
) -> None:
    async with running_pair(directory) as pair, pair.pull(2) as pull:
        request = pb.PullRequest(lease_id=pull._lease_id, num_blocks=2, transport=transport)
        await error_of(pull._stub.Pull(request).read(), code)
