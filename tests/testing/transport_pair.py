"""Two workers of one host, of which one sends blocks of its pool and the other takes them into its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
from prometheus_client import CollectorRegistry

from quire.engine.kv_cache.shared_memory import allocate_shared
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import StaleAttemptError, UnknownTicketError
from quire.kvtransfer.frame import Frame, Transport, digest
from quire.kvtransfer.leases import BlockLeases
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.pull_client import BlockPull, Holder
from quire.kvtransfer.pull_server import KvPullServicer
from quire.kvtransfer.push_receiver import KvTransferServicer
from quire.kvtransfer.push_sender import BlockPush, PromptBlocks
from quire.kvtransfer.transports.interface import Tell, Transports
from quire.kvtransfer.transports.messages import MESSAGES_ONLY
from quire.kvtransfer.transports.nixl import NixlPools
from quire.kvtransfer.transports.shared import SharedPools
from quire.protos import kvtransfer_pb2 as pb
from quire.protos import kvtransfer_pb2_grpc
from quire.rpc.channels import ChannelPool

WAIT_SECONDS = 10.0
LAYOUT = KvLayout(2, 2, 4, 8, "float16", "model-a", "float16", "float32-1")
NUM_BLOCKS = 40
SENDER_EPOCH, RECEIVER_EPOCH = "sender-1", "receiver-1"
TICKET = "ticket-1"
ATTEMPT = 3


def hash_of(block_id: int) -> bytes:
    return b"hash" + block_id.to_bytes(12, "little")


class Pool:
    """The sender's pool: no two blocks are alike. Block i of a prompt is block ``NUM_BLOCKS - 1 - i``."""

    layout = LAYOUT
    epoch = SENDER_EPOCH

    def __init__(self) -> None:
        memory = allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes)
        self.descriptor = memory.descriptor
        self.rows = memory.bytes.numpy().reshape(NUM_BLOCKS, LAYOUT.block_bytes)
        self.rows[:] = np.random.default_rng(7).integers(0, 256, self.rows.shape, np.uint8)
        self.digests = {i: digest(hash_of(i), self.rows[self.place(i)].data) for i in range(NUM_BLOCKS)}
        self.pins: dict[str, Sequence[int]] = {}
        self.before_frame: Callable[[int], None] = lambda index: None

    def place(self, index: int) -> int:
        return NUM_BLOCKS - 1 - index

    def payload(self, index: int) -> bytes:
        return bytes(self.rows[self.place(index)].data)

    def flip_a_bit(self, index: int) -> None:
        self.rows[self.place(index), 5] ^= 1

    def prompt(self, start: int, end: int) -> Iterable[Frame]:
        return (self.frame(index, hash_of(index), self.place(index)) for index in range(start, end))

    def frame(self, index: int, block_hash: bytes, block_id: int, *, is_bare: bool = False) -> Frame:
        self.before_frame(index)
        return Frame(index, block_hash, self.rows[block_id].data, self.digests[index], block_id)

    async def pin(self, lease_id: str, block_hashes: Sequence[bytes]) -> Sequence[int]:
        self.pins[lease_id] = [self.place(index) for index in range(len(block_hashes))]
        return self.pins[lease_id]

    def unpin(self, lease_id: str) -> None:
        self.pins.pop(lease_id, None)


class Target:
    """Blocks that a push or a pull fills; after ``close`` nothing is written."""

    num_held_blocks = 0

    def __init__(self, first_block: int = 0) -> None:
        self.first_block = first_block
        self.held: dict[int, bytes] = {}
        self.first_token_id: int | None = None
        self.reasons: list[str] = []
        self.before_write: Callable[[int], None] = lambda index: None
        self.progress = asyncio.Event()
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._writing = threading.Lock()
        self._is_closed = False

    def write(self, frame: Frame) -> None:
        self.before_write(frame.index)
        with self._writing:
            if self._is_closed:
                raise UnknownTicketError("the request has ended")
            copied = bytes(frame.payload)
            frame.check_copy(copied)
            self.held[frame.index] = copied
        self._loop.call_soon_threadsafe(self.progress.set)

    async def commit(self, first_token_id: int | None) -> None:
        self.first_token_id = first_token_id
        self.ended.set()

    def abort(self, reason: str) -> None:
        with self._writing:
            self._is_closed = True
        self.reasons.append(reason)
        self.ended.set()


class Sink:
    """Takes one push for each ticket; allocates blocks while ``allocates`` is set."""

    layout = LAYOUT
    epoch = RECEIVER_EPOCH

    def __init__(self) -> None:
        self.tickets = {TICKET: ATTEMPT}
        self.first_block = 0
        self.targets: dict[str, Target] = {}
        self.allocates = asyncio.Event()
        self.allocates.set()
        self.waiting = asyncio.Event()
        self.gave_up = asyncio.Event()
        self.opened = asyncio.Event()
        self.before_write: Callable[[int], None] = lambda index: None

    async def open(self, request: pb.PushOpen) -> Target:
        if request.ticket_id not in self.tickets:
            raise UnknownTicketError("no such ticket")
        if self.tickets[request.ticket_id] != request.attempt:
            raise StaleAttemptError("an older attempt")
        del self.tickets[request.ticket_id]
        self.waiting.set()
        try:
            await self.allocates.wait()
        except asyncio.CancelledError:
            self.gave_up.set()
            raise
        target = self.targets[request.ticket_id] = Target(self.first_block)
        target.before_write = self.before_write
        self.opened.set()
        return target


def open_transports(choice: str, directory: Path, epoch: str, pool: Pool | None, tell: Tell) -> Transports:
    """Open what ``--transport`` would, and offer the pool if there is one."""
    if choice == "messages":
        return MESSAGES_ONLY
    if choice == "nixl":
        by_nixl = NixlPools(epoch, tell)
        if pool is not None:
            by_nixl.share(pool.rows.ctypes.data, pool.rows.nbytes)
        return by_nixl
    shared = SharedPools(directory, tell)
    if pool is not None:
        shared.share(epoch, pool.descriptor)
    return shared


class Pair:
    """A sender and a receiver, each with its transports and its server."""

    def __init__(self, directory: Path, sender: str, receiver: str) -> None:
        self.told: list[tuple[str, Transport, str]] = []
        self.pool, self.sink = Pool(), Sink()
        self.sender = open_transports(sender, directory, SENDER_EPOCH, self.pool, lambda *line: None)
        self.receiver = open_transports(
            receiver, directory, RECEIVER_EPOCH, None, lambda *line: self.told.append(line)
        )
        self.registry = CollectorRegistry()
        self.transfers = TransferMetrics(self.registry)
        self.leases = BlockLeases(self.pool, self.transfers, max_blocks=NUM_BLOCKS)
        self.channels = ChannelPool()
        self.server = grpc.aio.server()
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    @asynccontextmanager
    async def running(self, window_blocks: int) -> AsyncIterator[Pair]:
        window_bytes = window_blocks * LAYOUT.block_bytes
        receives = KvTransferServicer(self.sink, self.transfers, self.receiver, window_bytes=window_bytes)
        kvtransfer_pb2_grpc.add_KvTransferServiceServicer_to_server(receives, self.server)
        lends = KvPullServicer(self.leases, self.transfers, self.sender)
        kvtransfer_pb2_grpc.add_KvPullServiceServicer_to_server(lends, self.server)
        await self.server.start()
        try:
            yield self
        finally:
            await self.channels.close()
            await self.server.stop(None)
            self.receiver.close()
            self.sender.close()

    def push(self, num_blocks: int, *, first_block: int = 0, **changes: Any) -> BlockPush:
        """Return a push that is right but for the changes."""
        ticket = pb.Ticket(
            ticket_id=changes.pop("ticket_id", TICKET),
            address=self.address,
            receiver_epoch=changes.pop("epoch", RECEIVER_EPOCH),
        )
        self.sink.first_block = first_block
        arguments: dict[str, Any] = {"attempt": ATTEMPT, "timeout": WAIT_SECONDS}
        blocks = PromptBlocks(changes.pop("layout", LAYOUT), num_blocks)
        return BlockPush(
            self.channels, ticket, blocks=blocks, transports=self.sender, **(arguments | changes)
        )

    def pull(self, num_blocks: int, **changes: Any) -> BlockPull:
        """Return a pull that is right but for the changes."""
        return BlockPull(
            self.channels,
            Holder(self.address, changes.pop("epoch", SENDER_EPOCH)),
            layout=LAYOUT,
            block_hashes=[hash_of(index) for index in range(num_blocks)],
            timeout=WAIT_SECONDS,
            transports=self.receiver,
        )

    async def pulled(self, pull: BlockPull, target: Target) -> None:
        """Write the blocks of an entered pull, as a worker does."""

        def write(frames: Sequence[Frame]) -> None:
            for frame in frames:
                target.write(frame)

        async for frames in pull.frames():
            await asyncio.to_thread(write, frames)

    @property
    def target(self) -> Target:
        return self.sink.targets[TICKET]

    def expected(self, start: int, end: int) -> dict[int, bytes]:
        return {index: self.pool.payload(index) for index in range(start, end)}

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"quire_kv_{name}", labels) or 0.0


@asynccontextmanager
async def running_pair(
    directory: Path, sender: str = "auto", receiver: str = "auto", *, window_blocks: int = 8
) -> AsyncIterator[Pair]:
    """Run two workers whose sockets are in a directory that only this test uses."""
    async with Pair(directory, sender, receiver).running(window_blocks) as pair:
        yield pair
