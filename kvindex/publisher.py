"""Keeps the index up to date with one worker's pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from quire.kvindex.index import UNREACHABLE, IndexFullError, IndexLease, LeaseLostError
from quire.kvindex.publish_ledger import BlockContent, PublishLedger
from quire.kvindex.worker_record import WorkerRecord

logger = logging.getLogger("quire.kvindex")

FLUSH_SECONDS = 0.005
"""Seconds for which blocks are collected for one publish, if the last one is long ago."""
REST_SECONDS = 0.05
"""Seconds between two publishes. Many sequences fill a block in almost every step, and a publish costs the
event loop as much as hundreds of their tokens."""
FLUSH_BLOCKS = 512
MAX_BLOCKS_PER_SECOND = 50_000
"""Limit per worker, so that Redis has time for look-ups while workers publish all their blocks again."""

REJOIN_JITTER_SECONDS = 2.0
"""Workers that lost their leases at the same time begin to publish again spread over this period."""
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0
FULL_SECONDS = 1.0
"""Seconds before the next publish to a full index."""

CANCEL_SECONDS = 0.1
CLOSE_SECONDS = 2.0


@dataclass(eq=False)
class BlockPublisher:
    """Publishes in order which blocks a pool stores and removes, and renews the worker's lease.

    The engine's thread calls ``stored`` and ``removed``, which only record the change. One task on the event
    loop publishes the changes. When the index fails, loses its data or falls too far behind, the task joins
    again with a new epoch and publishes all blocks of the pool. The index thus recovers by itself. A timeout
    also requires a new epoch. The command whose answer was lost may be executed later, after commands on
    another connection. With the new epoch it has no effect.

    Args:
        lease: the worker's side of an index.
        ledger: the blocks in the pool, and the pending changes.
        loop: the event loop that runs the task.
        beat_seconds: interval at which the lease is renewed.
        rejoin_jitter_seconds: most time between joining again and publishing again.
    """

    lease: IndexLease
    ledger: PublishLedger
    loop: asyncio.AbstractEventLoop
    beat_seconds: float
    _: KW_ONLY
    rejoin_jitter_seconds: float = REJOIN_JITTER_SECONDS

    def __post_init__(self) -> None:
        self._has_changed = asyncio.Event()
        self._is_full = False
        self._task: asyncio.Task[None] | None = None
        self.has_joined = asyncio.Event()
        """Set at the first lease."""

    # --- from the engine's thread -------------------------------------------------------------------------

    def stored(self, block_hashes: Sequence[bytes], parent_hash: bytes | None = None) -> None:
        """Record consecutive blocks of a chain that became reusable; without a parent they begin a chain."""
        if self.ledger.stored(block_hashes, parent_hash):
            self._wake()

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Record that blocks were evicted, children before parents."""
        if self.ledger.removed(block_hashes):
            self._wake()

    def described(self, blocks: Sequence[tuple[bytes, BlockContent]]) -> None:
        """Record consecutive reusable blocks of a chain with their contents, instead of ``stored``."""
        hashes, contents = [each for each, _ in blocks], [content for _, content in blocks]
        parent_hash = None if contents[0].begins_prompt else contents[0].parent_hash
        if self.ledger.stored(hashes, parent_hash, contents):
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has closed because the worker is ending.
            self.loop.call_soon_threadsafe(self._has_changed.set)

    # --- on the event loop --------------------------------------------------------------------------------

    def start(self, record: WorkerRecord) -> None:
        """Join with the worker's record, and publish the changes of the pool."""
        self._record = record
        self._task = self.loop.create_task(self._run())

    def announce(self, record: WorkerRecord) -> None:
        """Join again with a record if it has changed."""
        if record == self._record:
            return
        self._record = record
        self.join_again()  # a lease cannot change its record

    def join_again(self) -> None:
        """Begin a new lease, and publish all blocks again."""
        self.ledger.stop()
        self._has_changed.set()

    async def close(self) -> None:
        """Leave the index, so that no router sends more work here, and then remove the blocks."""
        while self._task is not None and not self._task.done():
            # Repeat until it ends: redis-py may mistake a cancellation for a broken connection.
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CANCEL_SECONDS)
        with contextlib.suppress(*UNREACHABLE):  # This includes TimeoutError, which is an OSError.
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.lease.leave()
                await self.lease.evict(self.ledger.leftovers())

    async def _run(self) -> None:
        backoff, jitter, problem = MIN_BACKOFF_SECONDS, 0.0, ""
        while True:
            pause = 0.0
            try:
                record = self._record
                await self.lease.join(record)
                self.ledger.restart()
                if record != self._record:  # it was announced while the lease began
                    self.ledger.stop()
                self.has_joined.set()
                logger.info("index_joined", extra={"fields": {"blocks": self.ledger.num_held}})
                backoff, problem = MIN_BACKOFF_SECONDS, ""
                await self._follow(self.loop.time() + jitter)
                logger.info("index_joining_again")
            except LeaseLostError:
                logger.warning("index_lease_lost")
            except UNREACHABLE as error:
                if problem != (problem := str(error)):  # the same problem is logged once
                    logger.warning("index_unreachable", extra={"fields": {"error": problem}})
                pause, backoff = backoff, min(2 * backoff, MAX_BACKOFF_SECONDS)
            self.ledger.stop()
            await asyncio.sleep(pause)
            jitter = self.rejoin_jitter_seconds * random.random()

    async def _follow(self, next_flush: float) -> None:
        """Beat, sweep and flush until the ledger stops following; flush first at ``next_flush``."""
        now = self.loop.time
        next_beat = now() + self.beat_seconds
        while self.ledger.is_following:
            if not self.ledger.num_pending:
                await self._wait_for_change(next_beat)
                next_flush = max(next_flush, now() + FLUSH_SECONDS)
            await asyncio.sleep(min(next_beat, next_flush) - now())
            if now() >= next_beat:
                await self.lease.beat()
                await self.lease.sweep()
                next_beat = now() + self.beat_seconds
            if now() >= next_flush:
                next_flush = now() + await self._flush()

    async def _wait_for_change(self, deadline: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self._has_changed.wait()
        self._has_changed.clear()

    async def _flush(self) -> float:
        """Send one batch of changes to the index; return the seconds to wait before the next batch."""
        gone = self.ledger.take_evictions(FLUSH_BLOCKS)
        if gone:
            await self.lease.evict(gone)
        new = self.ledger.take_publications(FLUSH_BLOCKS)
        if new:
            try:
                await self.lease.publish(new)
            except IndexFullError as error:
                # The lease still lives, and evictions will make room, so there is no need to join again.
                self.ledger.put_back(new)
                if not self._is_full:
                    logger.warning("index_full", extra={"fields": {"error": str(error)}})
                self._is_full = True
                return FULL_SECONDS
            self._is_full = False
        num_blocks = len(gone) + len(new)
        return REST_SECONDS if num_blocks < FLUSH_BLOCKS else num_blocks / MAX_BLOCKS_PER_SECOND
