"""Publishes the changes of one worker's blocks as KV events, for gateways with an index of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from quire.kvindex.event_frames import (
    CLEARED,
    Event,
    encode_batch,
    end_frames,
    live_frames,
    removed_event,
    replayed_frames,
    stored_events,
)
from quire.kvindex.event_sockets import EventSockets
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvindex.worker_record import WorkerRecord

MAX_CHANGES = 1 << 16
"""Blocks stored and removed in a log, beyond four times the pool's blocks, before a new log replaces it."""


class EventLease:
    """The writing side of the indexes that gateways build from one worker's KV events.

    The log has all batches since number 0, which clears the worker's blocks. So a subscriber has the whole
    state if it has every number since 0, and a number that is not the next one shows it a gap. A new log
    begins with each ``join``: at the start, after each subscription, and when the log has grown too long.

    Args:
        address: host:port of the events; replays are at the next port.
        model: name of the model, for the topic.
        shared_root: root hash of the scope that belongs to no tenant and has no salt.
        ledger: the ledger of the publisher that uses this lease; it has the contents of blocks.
        join_again: makes this publisher join again.

    Raises:
        OSError: one of the ports is taken.
    """

    def __init__(
        self,
        address: str,
        model: str,
        shared_root: bytes,
        ledger: PublishLedger,
        join_again: Callable[[], None],
    ) -> None:
        self._model = model
        self._shared_root = shared_root
        self._ledger = ledger
        self._join_again = join_again
        self._topic = b""
        self._log: list[bytes] = []
        self._num_changes = 0
        self._sockets = EventSockets(address, self._replay, join_again)

    async def join(self, record: WorkerRecord) -> None:
        """Begin a new log."""
        self._sockets.open()
        self._topic = f"kv@{record.address}@{self._model}".encode()
        self._log, self._num_changes = [], 0
        await self._send([CLEARED], num_changes=0)

    async def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Announce blocks, parents before children."""
        blocks = self._ledger.contents(block_hashes)
        await self._send(stored_events(blocks, self._shared_root), len(blocks))

    async def evict(self, block_hashes: Sequence[bytes]) -> None:
        """Announce that blocks are gone."""
        if block_hashes:
            await self._send([removed_event(block_hashes)], len(block_hashes))

    async def beat(self) -> None:
        """Do nothing, since subscribers see when the connection breaks."""

    async def sweep(self) -> int:
        """Do nothing, since each subscriber has an index of its own."""
        return 0

    async def leave(self) -> None:
        """Do nothing, since the evictions that follow announce the end."""

    def close(self) -> None:
        """Close the sockets."""
        self._sockets.close()

    async def _send(self, events: Sequence[Event], num_changes: int) -> None:
        if not events:
            return
        batch = encode_batch(time.time(), events)
        self._log.append(batch)
        self._num_changes += num_changes
        await self._sockets.send(live_frames(self._topic, len(self._log) - 1, batch))
        if self._num_changes > MAX_CHANGES + 4 * self._ledger.num_held:
            self._join_again()

    def _replay(self, identity: bytes, first: int) -> Iterator[list[bytes]]:
        log, topic = self._log, self._topic
        for number in range(first, len(log)):
            yield replayed_frames(identity, topic, number, log[number])
        yield end_frames(identity)
