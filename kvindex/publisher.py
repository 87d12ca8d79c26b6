"""Keeps the index in step with one worker's pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence

from redis.exceptions import RedisError

from quire.kvindex.membership import WorkerRecord
from quire.kvindex.redis_index import LeaseLostError, WorkerLease

logger = logging.getLogger("quire.kvindex")

FLUSH_SECONDS = 0.005
"""How long to gather blocks for one publish."""

MAX_BACKOFF_SECONDS = 2.0
CANCEL_SECONDS = 0.1


class BlockPublisher:
    """Publishes what a pool stores and removes, in order, and holds the worker's lease.

    ``stored`` and ``removed`` come from the engine's thread and only append to a queue. One task on the event
    loop follows them. When Redis fails or forgets, it joins again with a new epoch and publishes everything
    the worker holds: the index is right again without anybody's help.
    """

    def __init__(self, lease: WorkerLease, loop: asyncio.AbstractEventLoop, beat_seconds: float) -> None:
        self._lease = lease
        self._loop = loop
        self._beat_seconds = beat_seconds
        self._events: deque[tuple[bool, bytes]] = deque()
        self._has_events = asyncio.Event()
        # Insertion order has parents before children: a parent is stored first and removed last.
        self._held: dict[bytes, None] = {}
        self._task: asyncio.Task[None] | None = None

    # --- from the engine's thread -------------------------------------------------------------------------

    def stored(self, block_hashes: Sequence[bytes]) -> None:
        """Note blocks that became reusable."""
        self._note(True, block_hashes)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Note blocks that were evicted."""
        self._note(False, block_hashes)

    def _note(self, is_stored: bool, block_hashes: Sequence[bytes]) -> None:
        was_empty = not self._events
        self._events.extend((is_stored, block_hash) for block_hash in block_hashes)
        if was_empty:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the worker is ending
                self._loop.call_soon_threadsafe(self._has_events.set)

    # --- on the event loop --------------------------------------------------------------------------------

    def start(self, record: WorkerRecord) -> None:
        """Join with the worker's record and follow the pool."""
        self._task = self._loop.create_task(self._run(record))

    async def close(self) -> None:
        """Leave the index first, so that no router sends more work here."""
        while self._task is not None and not self._task.done():
            # Again and again: redis-py has been seen to take a cancellation for a broken connection.
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CANCEL_SECONDS)
        with contextlib.suppress(RedisError, OSError):
            await self._lease.leave()

    async def _run(self, record: WorkerRecord) -> None:
        backoff = 0.1
        while True:
            try:
                await self._lease.join(record)
                logger.info("index_joined", extra={"fields": {"blocks": len(self._held)}})
                await self._lease.publish(list(self._held))
                backoff = 0.1
                await self._follow()
            except LeaseLostError:
                logger.warning("index_lease_lost")
            except (RedisError, OSError) as error:
                logger.warning("index_unreachable", extra={"fields": {"error": str(error)}})
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _follow(self) -> None:
        next_beat = self._loop.time() + self._beat_seconds
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_beat):
                    await self._has_events.wait()
            if self._loop.time() >= next_beat:
                await self._lease.beat()
                next_beat = self._loop.time() + self._beat_seconds
            if self._has_events.is_set():
                await asyncio.sleep(FLUSH_SECONDS)
                await self._flush()

    async def _flush(self) -> None:
        """Publish the net effect of what was noted: a block that came and went is never mentioned."""
        self._has_events.clear()
        before, new, gone = self._held, dict[bytes, None](), dict[bytes, None]()
        while self._events:
            is_stored, block_hash = self._events.popleft()
            if is_stored:
                if block_hash in gone:
                    del gone[block_hash]
                new[block_hash] = None
            else:
                new.pop(block_hash, None)
                if block_hash in before:
                    gone[block_hash] = None
        for block_hash in gone:
            del before[block_hash]
        for block_hash in new:
            before.pop(block_hash, None)
            before[block_hash] = None
        await self._lease.publish(list(new))
        await self._lease.evict(list(gone))
