"""The reading side of an index in which only each k-th block of a chain is published."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kvindex.index import Holding, PrefixIndex


class StridedIndex:
    """Looks up only each k-th block; finds up to k - 1 blocks fewer than are held, and never more.

    Entries, publishes and the arguments of look-ups shrink to 1/k of their size without a stride.
    """

    def __init__(self, index: PrefixIndex, stride: int) -> None:
        self._index = index
        self._stride = stride

    async def look_up(self, block_hashes: Sequence[bytes]) -> list[Holding]:
        """Return each live worker that holds the first ``stride`` blocks, and how far its blocks go."""
        holdings = await self._index.look_up(block_hashes[self._stride - 1 :: self._stride])
        return [Holding(worker, num_blocks * self._stride) for worker, num_blocks in holdings]
