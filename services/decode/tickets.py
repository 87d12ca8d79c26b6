"""Issues tickets, which promise blocks for a prompt; writes pushed blocks, and admits the sequence."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import (
    BadBlockError,
    DigestMismatchError,
    NoBlocksError,
    ProtocolError,
    StaleAttemptError,
    UnknownTicketError,
)
from quire.kvtransfer.frame import Frame
from quire.protos import kvtransfer_pb2 as pb
from quire.rpc.errors import Aborted
from quire.services.worker.requests.updates import Updates


@dataclass(eq=False, slots=True)
class Promise:
    """The sequence that waits for the blocks of a ticket, and the functions that report its end.

    Attributes:
        first_block: index of the first block that the engine lacks.
        num_held_blocks: number of blocks before it that the engine keeps for the sequence.
        accepted: set once the engine has accepted the sequence and these are known, or the promise is closed.
        writing: held while a thread writes a block, and while the promise is being closed.
    """

    ticket_id: str
    sequence: Sequence
    attempt: int
    num_blocks: int
    updates: Updates
    first_block: int = 0
    num_held_blocks: int = 0
    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    is_claimed: bool = False
    is_closed: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)

    def accept(self, first_block: int) -> None:
        """Let the push begin: the engine has accepted the sequence."""
        self.first_block, self.num_held_blocks = first_block, len(self.sequence.held_blocks)
        self.accepted.set()

    def require_open(self) -> None:
        """Raise UnknownTicketError if the request has ended."""
        if self.is_closed:
            raise UnknownTicketError("the request has ended")

    def fail(self, reason: str) -> None:
        """End the request: its blocks will not arrive."""
        self.updates.put(
            Aborted(f"the prompt's blocks did not arrive: {reason}", reason="KV_TRANSFER_FAILED")
        )


class Tickets:
    """The promises of one worker to receive blocks; the ``BlockSink`` of pushes.

    Threads write the blocks. ``close`` waits for the block that is being written. After it no byte reaches
    the sequence's blocks, so the engine may give them to other sequences.
    """

    def __init__(self, engine: EngineThread, memory: KvMemory, layout: KvLayout, epoch: str) -> None:
        self.layout = layout
        self.epoch = epoch
        self._engine = engine
        self._memory = memory
        self._promises: dict[str, Promise] = {}

    def issue(self, sequence: Sequence, attempt: int, updates: Updates) -> Promise:
        """Promise to receive those of the sequence's blocks that the engine lacks."""
        num_blocks = -(-sequence.num_transferred_tokens // self.layout.block_size)
        promise = Promise(secrets.token_hex(16), sequence, attempt, num_blocks, updates)
        self._promises[promise.ticket_id] = promise
        return promise

    def close(self, promise: Promise) -> None:
        """Withdraw the promise; a push that is using it writes no more blocks."""
        with promise.writing:
            promise.is_closed = True
        self._promises.pop(promise.ticket_id, None)
        promise.accepted.set()

    async def open(self, request: pb.PushOpen) -> PromisedBlocks:
        """Start a push into promised blocks, once the sequence is accepted and they are allocated."""
        promise = self._promises.get(request.ticket_id)
        if promise is None or promise.is_claimed:
            raise UnknownTicketError("the ticket was never issued, was used, or its request has ended")
        if promise.attempt != request.attempt:
            raise StaleAttemptError(f"the ticket is for attempt {promise.attempt}, not {request.attempt}")
        if promise.num_blocks != request.num_blocks:
            raise ProtocolError(f"{promise.num_blocks} blocks were promised, {request.num_blocks} offered")
        promise.is_claimed = True
        try:
            await promise.accepted.wait()
            promise.require_open()
            await self._allocate(promise)
        except NoBlocksError as error:
            promise.fail(str(error))
            raise
        except BaseException:
            promise.fail("the sender went away while it waited for credit")
            raise
        return PromisedBlocks(promise, self._engine, self._memory)

    async def _allocate(self, promise: Promise) -> None:
        def reserve(engine: Engine, on_outcome: Callable[[bool], None]) -> None:
            engine.transfers.reserve(promise.sequence.attempt_id, on_outcome)

        if not await self._engine.call_back(reserve):
            promise.require_open()
            raise NoBlocksError(
                "requests that wait for each other's blocks fill the pool; this one gives way"
            )


class PromisedBlocks:
    """Blocks that one push fills; a ``Reservation``."""

    def __init__(self, promise: Promise, engine: EngineThread, memory: KvMemory) -> None:
        self.first_block, self.num_held_blocks = promise.first_block, promise.num_held_blocks
        self._promise = promise
        self._engine = engine
        self._memory = memory
        self._admission: Future[None] | None = None

    def write(self, frame: Frame) -> None:
        """Write a block after checking that it is the expected one, and check the copy."""
        sequence = self._promise.sequence
        is_full = frame.index < sequence.num_transferred_tokens // self._memory.shape.block_size
        if frame.block_hash != (sequence.block_hashes[frame.index] if is_full else b""):
            raise DigestMismatchError(f"block {frame.index} is not the block of these tokens")
        try:
            with self._promise.writing:
                self._promise.require_open()
                copied = self._memory.write(sequence.block_table[frame.index], frame.payload)
        except ValueError as error:
            raise BadBlockError(f"block {frame.index}: {error}") from error
        frame.check_copy(copied)

    async def commit(self, first_token_id: int | None) -> None:
        """Let the engine decode after the first token; without one, the engine samples that token too."""
        self._promise.require_open()
        loop, updates = asyncio.get_running_loop(), self._promise.updates
        attempt_id = self._promise.sequence.attempt_id

        def admit(engine: Engine) -> None:
            update = engine.transfers.admit(attempt_id, first_token_id)
            if update.status.is_finished:
                # This is done here, since the sender may have cancelled the commit while it ran.
                loop.call_soon_threadsafe(updates.put, update)

        self._admission = self._engine.post(admit)
        await asyncio.wrap_future(self._admission)

    def abort(self, reason: str) -> None:
        """End the request unless it was committed or has ended."""
        if not self._is_committed and not self._promise.is_closed:
            self._promise.fail(reason)

    @property
    def _is_committed(self) -> bool:
        """Whether the engine has admitted the sequence or is about to; False after a cancelled admission."""
        admission = self._admission
        if admission is None or admission.cancelled():
            return False
        return not admission.done() or admission.exception() is None
