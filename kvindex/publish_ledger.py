"""Tracks the blocks in a worker's pool, and the changes that are not in the index yet."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

MAX_EVICTIONS = 1 << 18
"""Most pending evictions. With more, beginning a new epoch is cheaper than applying them."""


class BlockContent(NamedTuple):
    """What the hash of a block was computed from.

    Attributes:
        parent_hash: hash of the block before it; the root hash of its scope if it begins a prompt.
        token_ids: the block's tokens.
        begins_prompt: whether there is no block before it.
    """

    parent_hash: bytes
    token_ids: array[int]
    begins_prompt: bool


class PublishLedger:
    """Keeps the difference between a worker's pool and its entries in the index. It is thread-safe.

    Opposite changes cancel out: a block that was stored and removed again is never sent to the index. Memory
    is therefore bounded by the pool and ``max_evictions``, and no change has to be dropped.

    The order of each dict keeps the index closed under prefixes. A pool stores parents first and removes
    children first, and a block that is stored or removed again moves to the end of its dict. From the front
    of a dict, blocks to publish therefore follow their parents, and blocks to evict follow their children.

    Before the first ``restart``, after a ``stop`` and after too many evictions, the ledger records no
    changes, but only which blocks are in the pool: all entries in the index are about to be replaced.
    """

    def __init__(
        self, max_evictions: int = MAX_EVICTIONS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_evictions = max_evictions
        self._clock = clock
        self._lock = threading.Lock()
        # The values are None in the ledger of an index that needs only hashes.
        self._held: dict[bytes, BlockContent | None] = {}
        # The values are the times at which the changes were recorded.
        self._to_publish: dict[bytes, float] = {}
        self._to_evict: dict[bytes, float] = {}
        self._is_following = False

    @property
    def is_following(self) -> bool:
        """Whether the index will be correct once the pending changes are applied."""
        return self._is_following

    @property
    def num_held(self) -> int:
        """Number of blocks in the worker's pool."""
        return len(self._held)

    @property
    def num_pending(self) -> int:
        """Number of changes that are not in the index yet."""
        return len(self._to_publish) + len(self._to_evict)

    @property
    def lag_seconds(self) -> float:
        """Age of the oldest pending change; 0 if there is none."""
        with self._lock:
            queues = (self._to_publish, self._to_evict)
            since = min((next(iter(queue.values())) for queue in queues if queue), default=None)
            return 0.0 if since is None else self._clock() - since

    def stored(
        self,
        block_hashes: Sequence[bytes],
        parent_hash: bytes | None = None,
        contents: Sequence[BlockContent] = (),
    ) -> bool:
        """Record consecutive blocks of a prompt as stored; return whether they are the first pending changes.

        Without a parent they begin a prompt.
        """
        with self._lock:
            was_settled, now = self.num_pending == 0, self._clock()
            if parent_hash is not None and parent_hash not in self._held:
                return False  # Without the parent, no look-up reaches these blocks.
            for each, content in zip_longest(block_hashes, contents):
                if each in self._held:
                    continue
                self._held[each] = content
                if self._is_following and self._to_evict.pop(each, None) is None:
                    self._to_publish[each] = now
            return was_settled and self.num_pending > 0

    def removed(self, block_hashes: Sequence[bytes]) -> bool:
        """Record that blocks were evicted, children first; return whether the publisher must be woken."""
        with self._lock:
            was_settled, now = self.num_pending == 0, self._clock()
            for each in block_hashes:
                if each not in self._held:
                    continue
                del self._held[each]
                if self._is_following and self._to_publish.pop(each, None) is None:
                    self._to_evict[each] = now
            if len(self._to_evict) > self._max_evictions:
                self._stop()
                return True
            return was_settled and self.num_pending > 0

    def contents(self, block_hashes: Sequence[bytes]) -> list[tuple[bytes, BlockContent]]:
        """Return those of these blocks that are still in the pool, with the content that was recorded."""
        with self._lock:
            found = [(each, self._held.get(each)) for each in block_hashes]
        return [(each, content) for each, content in found if content is not None]

    def restart(self) -> None:
        """Begin to record changes for an index that has no entries of this worker."""
        with self._lock:
            self._to_publish = dict.fromkeys(self._held, self._clock())
            self._to_evict = {}
            self._is_following = True

    def stop(self) -> None:
        """Stop recording changes, because it is unknown which entries the index contains."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        self._to_publish, self._to_evict, self._is_following = {}, {}, False

    def take_evictions(self, limit: int) -> list[bytes]:
        """Remove and return up to ``limit`` blocks to evict, and record them as absent from the index."""
        with self._lock:
            return _take(self._to_evict, limit)

    def take_publications(self, limit: int) -> list[bytes]:
        """Remove and return up to ``limit`` blocks to publish, and record them as present in the index."""
        with self._lock:
            return _take(self._to_publish, limit)

    def put_back(self, block_hashes: Sequence[bytes]) -> None:
        """Undo ``take_publications`` after the index refused all the blocks that were taken."""
        with self._lock:
            for each in block_hashes:
                self._to_evict.pop(each, None)
            now = self._clock()
            again = {each: now for each in block_hashes if each in self._held}
            self._to_publish = again | self._to_publish

    def leftovers(self) -> list[bytes]:
        """Return all blocks of this worker that the index may contain, children before parents."""
        with self._lock:
            return [*self._to_evict, *reversed(self._held)]


def _take(pending: dict[bytes, float], limit: int) -> list[bytes]:
    batch = list(islice(pending, limit))
    for each in batch:
        del pending[each]
    return batch
