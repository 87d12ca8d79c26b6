"""The cached blocks of a simulated worker, and which of them the index has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class BlockCache:
    """Blocks in the order of their last use; children are evicted before parents, as in a worker's pool."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, bool] = OrderedDict()
        """The blocks, and whether they were published."""

    def num_cached(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are in this cache."""
        return sum(1 for _ in takewhile(self._blocks.__contains__, block_hashes))

    def num_published(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks the index has of this cache."""
        return sum(1 for _ in takewhile(self._blocks.get, block_hashes))

    def store(self, block_hashes: Sequence[bytes], num_kept: int = 0) -> list[bytes]:
        """Cache blocks, and evict others until these and ``num_kept`` more fit; return those to publish."""
        new = [each for each in block_hashes if each not in self._blocks]
        for each in reversed(block_hashes):
            self._blocks.setdefault(each, False)
            self._blocks.move_to_end(each)
        num_evicted = max(0, len(self._blocks) + num_kept - self._num_blocks)
        for _ in range(min(num_evicted, len(self._blocks))):
            self._blocks.popitem(last=False)
        return new

    def publish(self, block_hashes: Sequence[bytes]) -> None:
        """Publish those of the blocks that have not been evicted."""
        self._blocks |= {each: True for each in block_hashes if each in self._blocks}
