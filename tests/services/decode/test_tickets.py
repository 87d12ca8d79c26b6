"""What becomes of a request whose sender goes away while it commits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest
import torch

from quire.benchmarks.harness.engines import model_without_layers
from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.scheduling.transfers import Transfers
from quire.engine.sequences.sequence import Sequence, SequenceUpdate
from quire.kvindex.kv_layout import KvLayout, KvShape
from quire.kvtransfer.errors import BadBlockError, DigestMismatchError, StaleAttemptError, UnknownTicketError
from quire.kvtransfer.frame import Frame, digest
from quire.protos import kvtransfer_pb2 as pb
from quire.rpc.errors import Aborted
from quire.sampling.params import SamplingParams
from quire.services.decode.tickets import Promise, PromisedBlocks, Tickets
from quire.services.worker.requests.updates import Updates

BLOCK_SIZE = 4
SECONDS = 20.0


class Receiver:
    """A decode worker's side of one push whose blocks are granted; the engine's thread can be held up."""

    def __init__(self) -> None:
        model = model_without_layers(64)
        self.memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "float32"), 8, torch.device("cpu"))
        limits = SchedulerConfig(BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=64)
        self.thread = EngineThread(Engine(model, self.memory, limits))
        self.has_paused, self.goes_on = threading.Event(), threading.Event()

    async def open(self) -> tuple[PromisedBlocks, Updates]:
        tickets, request, updates = await self.issue(attempt=0)
        return await tickets.open(request), updates

    async def issue(self, attempt: int, *, is_accepted: bool = True) -> tuple[Tickets, pb.PushOpen, Updates]:
        """Return the tickets with one for an attempt, and the request that opens its push."""
        self.thread.start()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        sequence = Sequence("r", [2] * 8, 8, params, b"")
        layout = KvLayout(1, 1, BLOCK_SIZE, 1, "float32", "digest", "float32", "float32-1")
        tickets = Tickets(self.thread, self.memory, layout, "epoch")
        updates = Updates()
        self.thread.subscribe("r", updates.put)
        self.promise = tickets.issue(sequence, attempt, updates)
        if is_accepted:
            await self.accept()
        request = pb.PushOpen(ticket_id=self.promise.ticket_id, attempt=attempt, num_blocks=2)
        return tickets, request, updates

    async def accept(self) -> None:
        """Let the engine accept the sequence."""
        self.promise.accept(await self.thread.call(lambda e: e.transfers.accept(self.promise.sequence)))

    async def pause(self) -> None:
        """Return when the engine's thread stands still."""

        def stand_still(engine: Engine) -> None:
            self.has_paused.set()
            self.goes_on.wait()

        self.thread.post(stand_still)
        await asyncio.to_thread(self.has_paused.wait)


def promised(memory: Any) -> tuple[Promise, PromisedBlocks]:
    """Return a promise of the block 1 of a memory, and the writer of what arrives."""
    sequence = Sequence("r", [2] * 3, 3, SamplingParams(), b"")
    sequence.block_table = [1]
    promise = Promise("ticket", sequence, 0, 1, Updates())
    return promise, PromisedBlocks(promise, cast("EngineThread", None), memory)


async def test_a_push_of_another_attempt_is_refused_and_leaves_the_ticket_to_its_own() -> None:
    receiver = Receiver()
    tickets, request, _ = await receiver.issue(attempt=2)
    for attempt in (1, 3):
        other = pb.PushOpen()
        other.CopyFrom(request)
        other.attempt = attempt
        with pytest.raises(StaleAttemptError, match=f"attempt 2, not {attempt}"):
            await tickets.open(other)
    await tickets.open(request)
    with pytest.raises(UnknownTicketError):
        await tickets.open(request)
    await receiver.thread.stop()


async def test_a_push_waits_until_its_sequence_is_accepted() -> None:
    receiver = Receiver()
    tickets, request, _ = await receiver.issue(attempt=0, is_accepted=False)
    opening = asyncio.create_task(tickets.open(request))
    # The engine runs its commands in order, so it would have run that of the push.
    for _ in range(3):
        await receiver.thread.call(lambda engine: None)
    assert not opening.done()
    await receiver.accept()
    assert (await opening).first_block == 0
    await receiver.thread.stop()


async def test_a_push_of_a_request_that_ends_before_its_acceptance_is_refused() -> None:
    receiver = Receiver()
    tickets, request, _ = await receiver.issue(attempt=0, is_accepted=False)
    opening = asyncio.create_task(tickets.open(request))
    await asyncio.sleep(0)
    tickets.close(receiver.promise)
    with pytest.raises(UnknownTicketError, match="the request has ended"):
        await asyncio.wait_for(opening, SECONDS)
    await receiver.thread.stop()


async def test_a_sender_that_goes_away_before_the_acceptance_ends_the_request() -> None:
    receiver = Receiver()
    tickets, request, updates = await receiver.issue(attempt=0, is_accepted=False)
    opening = asyncio.create_task(tickets.open(request))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(Aborted, match="went away"):
        await asyncio.wait_for(updates.next(), SECONDS)
    await receiver.thread.stop()


async def test_a_commit_that_is_cancelled_before_it_runs_ends_the_request() -> None:
    receiver = Receiver()
    blocks, updates = await receiver.open()
    await receiver.pause()
    commit = asyncio.create_task(blocks.commit(5))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    blocks.abort("the sender went away")
    receiver.goes_on.set()
    with pytest.raises(Aborted):
        await asyncio.wait_for(updates.next(), SECONDS)
    await receiver.thread.stop()


async def test_a_commit_that_is_cancelled_while_it_runs_is_one() -> None:
    receiver = Receiver()
    blocks, updates = await receiver.open()

    def admit(*args: Any) -> SequenceUpdate:
        receiver.has_paused.set()
        receiver.goes_on.wait()
        return Transfers.admit(*args)

    await receiver.thread.call(
        lambda e: setattr(e.transfers, "admit", lambda *args: admit(e.transfers, *args))
    )
    commit = asyncio.create_task(blocks.commit(5))
    await asyncio.to_thread(receiver.has_paused.wait)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    blocks.abort("the sender went away")
    receiver.goes_on.set()
    update = await asyncio.wait_for(updates.next(), SECONDS)
    assert update.status.is_finished
    await receiver.thread.stop()


async def test_a_block_that_would_end_the_engine_is_the_senders_fault() -> None:
    """The tokens that follow in a block are divided by its stored scale."""
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "int8"), 8, torch.device("cpu"))
    _, blocks = promised(memory)
    with pytest.raises(BadBlockError, match="block 0: a stored scale"):
        blocks.write(Frame(0, b"", bytes(memory.shape.block_bytes)))


class SlowMemory:
    """Memory in which a write takes until it may end."""

    shape = KvShape(1, 1, BLOCK_SIZE, 1, "float32")

    def __init__(self) -> None:
        self.is_writing, self.may_end = threading.Event(), threading.Event()
        self.num_written = 0

    def write(self, block_id: int, payload: bytes) -> bytes:
        self.is_writing.set()
        assert self.may_end.wait(SECONDS)
        self.num_written += 1
        return payload


async def test_a_promise_closes_after_the_block_that_is_being_written_and_before_the_next() -> None:
    """The engine may give the blocks to others once the promise is closed."""
    memory = SlowMemory()
    promise, blocks = promised(memory)
    tickets = Tickets(cast("EngineThread", None), cast("KvMemory", memory), cast("KvLayout", None), "epoch")
    frame = Frame(0, b"", bytes(memory.shape.block_bytes))
    writing = asyncio.create_task(asyncio.to_thread(blocks.write, frame))
    await asyncio.to_thread(memory.is_writing.wait, SECONDS)
    closing = asyncio.create_task(asyncio.to_thread(tickets.close, promise))
    await asyncio.sleep(0.02)
    assert not closing.done()
    memory.may_end.set()
    await asyncio.gather(writing, closing)
    with pytest.raises(UnknownTicketError):
        blocks.write(frame)
    assert memory.num_written == 1


def test_a_copy_that_differs_from_its_digest_is_refused() -> None:
    memory = KvMemory(KvShape(1, 1, BLOCK_SIZE, 1, "float32"), 8, torch.device("cpu"))
    _, blocks = promised(memory)
    payload = bytes(range(memory.shape.block_bytes))
    blocks.write(Frame(0, b"", payload, digest(b"", payload)))
    assert memory.read(1) == payload
    with pytest.raises(DigestMismatchError):
        blocks.write(Frame(0, b"", payload, digest(b"", payload) + 1))
