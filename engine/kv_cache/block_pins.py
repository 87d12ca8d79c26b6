"""Blocks held for transfers between workers: pinned to be read, or reserved to be written.

A pin holds a reference to each of its blocks, so they are neither evicted nor written by a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from quire.engine.kv_cache.block_pool import BlockPool


class BlockPins:
    """Named block tables that belong to no sequence.

    Args:
        pool: the blocks.
        clock: returns seconds, for the times when pins begin.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = perf_counter) -> None:
        self._pool = pool
        self._clock = clock
        self._tables: dict[str, list[int]] = {}
        self._begun_at: dict[str, float] = {}

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks; a block that several pins hold counts once for each."""
        return sum(map(len, self._tables.values()))

    @property
    def oldest_begun_at(self) -> float | None:
        """Time when the oldest pin began, in seconds of the clock; None if there is none."""
        return min(self._begun_at.values(), default=None)

    @property
    def block_ids(self) -> set[int]:
        """Ids of all pinned blocks."""
        return {block_id for table in self._tables.values() for block_id in table}

    def pin(self, name: str, block_hashes: Sequence[bytes]) -> list[int]:
        """Pin the leading blocks that are in the pool, and return their ids.

        If there are none, do not begin a pin.
        """
        if name in self._tables:
            raise ValueError(f"pin {name} is already here")
        block_ids = self._pool.look_up(block_hashes)
        if block_ids:
            self._pool.share(block_ids)
            self._tables[name] = block_ids
            self._begun_at[name] = self._clock()
        return block_ids[:]

    def reserve(self, name: str, num_blocks: int) -> list[int]:
        """Add empty blocks to a pin, or to a new one, for the caller to write; return their ids.

        Raises:
            NoFreeBlocksError: there are too few blocks; the pin is unchanged.
        """
        block_ids = self._pool.allocate_prefix(num_blocks)
        self._tables.setdefault(name, []).extend(block_ids)
        self._begun_at.setdefault(name, self._clock())
        return block_ids

    def reserve_fewer(self, name: str, first_index: int, num_blocks: int) -> list[int]:
        """Replace a pin's empty blocks, which begin at ``first_index``, by fewer ones; return their ids."""
        table = self._tables[name]
        self._pool.free(table[first_index:])
        del table[first_index:]
        return self.reserve(name, num_blocks)

    def seal(self, name: str, first_index: int, block_hashes: Sequence[bytes]) -> None:
        """Make a pin's written blocks from ``first_index`` on reusable by any sequence."""
        table = self._tables[name]
        parent_hash = self._pool.hash_of(table[first_index - 1]) if first_index else None
        for index, block_hash in enumerate(block_hashes, first_index):
            table[index] = self._pool.seal(table[index], block_hash, parent_hash)
            parent_hash = block_hash

    def unpin(self, name: str) -> None:
        """Drop a pin; do nothing if it is unknown."""
        self._begun_at.pop(name, None)
        self._pool.free(self._tables.pop(name, []))
