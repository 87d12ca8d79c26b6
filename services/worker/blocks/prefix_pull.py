"""Copies the first blocks of a prompt from another worker before the rest of the prompt is computed.

No request depends on a pull. If it fails, the request uses the blocks that arrived, and computes the rest of
the prompt here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_cache.block_pool import NoFreeBlocksError
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import BadBlockError, PullFailedError, TransferError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.metrics import TransferMetrics
from quire.kvtransfer.pull_client import BlockPull, Holder
from quire.kvtransfer.transports.interface import Transports
from quire.protos import worker_pb2
from quire.rpc.channels import ChannelPool
from quire.services.server.log import EventLogger

PULL_SECONDS = 5.0
"""Time limit of a pull for which the router gives none."""

_log = EventLogger("worker")


@dataclass(eq=False)
class PrefixPuller:
    """Fills this worker's prefix cache with blocks of its peers."""

    engine: EngineThread
    memory: KvMemory
    layout: KvLayout
    channels: ChannelPool
    metrics: TransferMetrics
    transports: Transports

    async def pull(self, sequence: Sequence, source: worker_pb2.PullSource) -> worker_pb2.PullSummary:
        """Copy the blocks that the peer should have and this worker lacks; return what arrived.

        They are then in the prefix cache, where the engine finds them when it admits the sequence.
        """
        await asyncio.to_thread(sequence.extend_hashes, self.layout.block_size)
        # The last token is always computed, for its logits.
        num_usable = min(sequence.max_cached_tokens, sequence.num_tokens - 1) // self.layout.block_size
        block_hashes = sequence.block_hashes[: min(source.num_blocks, num_usable)]
        if not block_hashes:
            return worker_pb2.PullSummary()
        start = perf_counter()
        pulled = _PulledBlocks(f"pull:{sequence.attempt_id}", self.engine, self.memory, block_hashes)
        failure = ""
        try:
            await pulled.open()
            # The limit is for the peer: without a pull, the prompt would wait for this worker's engine, too.
            async with asyncio.timeout(source.timeout_ms / 1000 or PULL_SECONDS):
                await self._fill(pulled, source)
        except (TransferError, NoFreeBlocksError, TimeoutError) as error:
            failure = _reason(error)
            self.metrics.record_failure("pull", failure)
            _log.warning(
                "pull_failed",
                attempt_id=sequence.attempt_id,
                peer=source.address,
                reason=failure,
                details=str(error),
                pulled_blocks=pulled.num_written,
            )
        finally:
            pulled.close()
        seconds = perf_counter() - start
        self.metrics.record_pull(pulled.num_written, pulled.num_bytes, seconds, pulled.transport)
        return worker_pb2.PullSummary(
            num_blocks=pulled.num_written,
            num_bytes=pulled.num_bytes,
            seconds=seconds,
            transfer_seconds=pulled.transfer_seconds,
            failure=failure,
            num_held_blocks=pulled.num_held,
        )

    async def _fill(self, pulled: _PulledBlocks, source: worker_pb2.PullSource) -> None:
        if not (missing := pulled.missing):
            return
        pull = BlockPull(
            self.channels,
            Holder(source.address, source.epoch),
            layout=self.layout,
            block_hashes=missing,
            timeout=source.timeout_ms / 1000 or PULL_SECONDS,
            transports=self.transports,
        )
        async with pull:
            pulled.transport = pull.transport
            if pull.num_blocks < len(missing):
                # Blocks were evicted that the index still names; the others are copied.
                self.metrics.record_failure("pull", "evicted")
                await pulled.shorten(pull.num_blocks)
            if pull.num_blocks:
                start = perf_counter()
                async for frames in pull.frames():
                    await asyncio.to_thread(pulled.write, frames)
                pulled.transfer_seconds = perf_counter() - start


class _PulledBlocks:
    """Blocks of this worker that one pull fills.

    They are pinned under a name in the engine, so ``close`` can undo all that a cancelled pull has begun.
    Threads write the blocks. ``close`` waits for the block that is being written; after it, no byte reaches
    them.
    """

    def __init__(self, name: str, engine: EngineThread, memory: KvMemory, block_hashes: Items[bytes]) -> None:
        self._name = name
        self._engine = engine
        self._memory = memory
        self._block_hashes = block_hashes
        self.num_held = 0
        self._block_ids: list[int] = []
        self._writing = threading.Lock()
        self._is_closed = False
        self.num_written = self.num_bytes = 0
        self.transfer_seconds = 0.0
        self.transport = Transport.MESSAGES

    @property
    def missing(self) -> Items[bytes]:
        """Hashes of the blocks that this worker did not have."""
        return self._block_hashes[self.num_held :]

    async def open(self) -> None:
        """Pin the blocks that this worker already has, and reserve empty ones for the others."""
        await self._engine.call(self._claim)

    def _claim(self, engine: Engine) -> None:
        self.num_held = len(engine.pin(self._name, self._block_hashes))
        self._block_ids = engine.pins.reserve(self._name, len(self.missing))

    async def shorten(self, num_blocks: int) -> None:
        """Expect fewer blocks: windows show the last ones, which are thus whole, as the peer sends them."""
        await self._engine.call(lambda engine: self._claim_fewer(engine, num_blocks))

    def _claim_fewer(self, engine: Engine, num_blocks: int) -> None:
        self._block_ids = engine.pins.reserve_fewer(self._name, self.num_held, num_blocks)

    def write(self, frames: Items[Frame]) -> None:
        """Write blocks in order until ``close``, and count those whose copies are correct."""
        for frame in frames:
            with self._writing:
                if self._is_closed:
                    return
                try:
                    frame.check_copy(self._memory.write(self._block_ids[frame.index], frame.payload))
                except ValueError as error:
                    raise BadBlockError(f"block {frame.index}: {error}") from error
                self.num_written += 1
                self.num_bytes += len(frame.payload)

    def close(self) -> None:
        """Add the written blocks to the prefix cache, and release all blocks."""
        with self._writing:
            self._is_closed = True
        with suppress(EngineStoppedError):
            self._engine.post(self._seal)

    def _seal(self, engine: Engine) -> None:
        arrived = self.missing[: self.num_written]
        if arrived:
            engine.pins.seal(self._name, self.num_held, arrived)
        engine.pins.unpin(self._name)


def _reason(error: Exception) -> str:
    if isinstance(error, PullFailedError):
        return error.status.name.lower()
    if isinstance(error, TransferError):
        return error.reason
    return "no_blocks" if isinstance(error, NoFreeBlocksError) else "timeout"
