"""Which prompts this router has sent where: what workers will hold before any index can know it."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence

MAX_BLOCKS = 1 << 16
"""Most blocks remembered of one worker."""


class PrefixHistory:
    """Blocks that workers were sent to compute, oldest forgotten first.

    A guess: it hears of no eviction and of no failure, and it knows this router's requests alone. Young
    entries are a good guess, because the worker is computing these very blocks.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sent: dict[str, OrderedDict[bytes, float]] = {}

    def note(self, worker_id: str, block_hashes: Sequence[bytes], max_blocks: int) -> None:
        """Remember that a worker gets a prompt's blocks, of which it can keep ``max_blocks``."""
        sent, now = self._sent.setdefault(worker_id, OrderedDict()), self._clock()
        # Children first: what is forgotten first is then a leaf, and the rest closed under prefixes.
        for each in reversed(block_hashes):
            sent[each] = now
            sent.move_to_end(each)
        for _ in range(len(sent) - min(max_blocks, MAX_BLOCKS)):
            sent.popitem(last=False)

    def num_held(self, worker_id: str, block_hashes: Sequence[bytes], max_age_seconds: float) -> int:
        """Return how many of a prompt's leading blocks a worker got within the time."""
        sent = self._sent.get(worker_id)
        if not sent or not block_hashes:
            return 0
        oldest = self._clock() - max_age_seconds

        def is_missing(block_hash: bytes) -> bool:
            sent_at = sent.get(block_hash)
            return sent_at is None or sent_at < oldest

        # A block is never older than its children, so whatever follows a missing one is missing too.
        return bisect_left(block_hashes, True, key=is_missing)

    def forget(self, worker_id: str) -> None:
        """Drop a worker that has left."""
        self._sent.pop(worker_id, None)
