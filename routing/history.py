"""Remembers which blocks this router sent to which worker, before the index can list them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_BLOCKS = 1 << 16
"""Maximum number of blocks remembered for each worker."""


class PrefixHistory:
    """Remembers the blocks that each worker was sent to compute, and forgets the oldest first.

    This is an approximation. It does not see evictions or failures, and it knows only the requests of this
    router. Recent entries are reliable, because the worker is computing exactly these blocks.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: dict[str, OrderedDict[bytes, float]] = {}

    def note(self, worker_id: str, block_hashes: Sequence[bytes], max_blocks: int) -> None:
        """Remember that a worker was sent a prompt's blocks.

        Args:
            max_blocks: capacity of the worker's pool; no more blocks are remembered for the worker.
        """
        sent, now = self._sent.setdefault(worker_id, OrderedDict()), self._clock()
        # Children first: the entry forgotten first is then always a leaf, so the remaining entries stay
        # closed under prefixes.
        for each in reversed(block_hashes):
            sent[each] = now
            sent.move_to_end(each)
        for _ in range(len(sent) - min(max_blocks, MAX_BLOCKS)):
            sent.popitem(last=False)

    def num_cached(self, worker_id: str, block_hashes: Sequence[bytes], max_age_seconds: float) -> int:
        """Return how many of a prompt's leading blocks a worker was sent in the last ``max_age_seconds``."""
        sent = self._sent.get(worker_id)
        if not sent or not block_hashes:
            return 0
        oldest = self._clock() - max_age_seconds

        def is_missing(block_hash: bytes) -> bool:
            sent_at = sent.get(block_hash)
            return sent_at is None or sent_at < oldest

        # A block is never older than its children, so all blocks after a missing one are missing too.
        return bisect_left(block_hashes, True, key=is_missing)

    def forget(self, worker_id: str) -> None:
        """Drop the entries of a worker that has left."""
        self._sent.pop(worker_id, None)
