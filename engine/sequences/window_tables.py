"""The ledger of block tables if some layers have a window, and others see all tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.engine.kv_cache.window_pool import WindowPool
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence


@dataclass(eq=False)
class WindowTables(BlockTables):
    """Keeps whole tables, and passes the blocks that a sequence's windows have left behind.

    A prompt gets blocks for a window and a step at first, and more in later steps: so the parts of its blocks
    that windows see are not all allocated together.
    """

    pool: WindowPool

    def take_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """Start the table with the longest cached prefix after which the sequence can go on."""
        super().take_cached_prefix(sequence, max_tokens)
        usable = min(max_tokens, sequence.max_cached_tokens) // self.block_size
        self.pool.note_start(sequence.block_hashes[:usable])

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Return a new sequence that shares all blocks of ``parent``."""
        child = super().fork(parent, index)
        self.pool.pass_by(child.block_table[: child.num_passed_blocks])
        return child

    def replace(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Give a sequence another table, of which it has passed no block."""
        super().replace(sequence, block_ids)
        sequence.num_passed_blocks = 0

    def free(self, sequence: Sequence) -> None:
        """Return a sequence's blocks to the pool, where full ones remain cached."""
        self.pool.free(sequence.block_table, sequence.num_passed_blocks)
        self.replace(sequence, [])

    def drop_unseen(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Pass the blocks that no token after the computed ones sees in a layer with a window."""
        first = sequence.num_passed_blocks
        last = min(self._first_seen_block(num_computed_tokens), len(sequence.block_table))
        if last > first:
            self.pool.pass_by(sequence.block_table[first:last])
            sequence.num_passed_blocks = last

    # --- blocks of which some are bare --------------------------------------------------------------------

    def reserve(self, sequence: Sequence) -> None:
        """Extend the table to hold every token of a prompt that another worker computes.

        Blocks that no later token sees in a layer with a window are bare.

        Raises:
            NoFreeBlocksError: there are too few blocks; the table is unchanged.
        """
        sequence.block_table += self.pool.allocate(*self._missing(sequence))

    def num_missing(self, sequence: Sequence) -> int:
        """Return the size of the blocks that a sequence lacks to hold all its tokens."""
        return self.pool.size_of(*self._missing(sequence))

    def _missing(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many blocks a sequence lacks, and how many of them are bare."""
        num_held, num_blocks = len(sequence.block_table), super().num_missing(sequence)
        num_unseen = self._first_seen_block(sequence.num_transferred_tokens) - num_held
        return num_blocks, min(num_blocks, max(0, num_unseen))

    def allocate_swapped(
        self, sequences: Iterable[Sequence], tables: list[list[int]], num_blocks: int, max_blocks: int
    ) -> list[int] | None:
        """Allocate blocks for tables in host memory; see ``BlockTables.allocate_swapped``."""
        seen: set[int] = set()
        for sequence, table in zip(sequences, tables, strict=True):
            seen.update(table[self._first_seen_block(sequence.num_computed_tokens) :])
        unseen = [index for index in range(num_blocks) if index not in seen]
        if self.pool.size_of(num_blocks, len(unseen)) > max_blocks:
            return None
        block_ids = self.pool.allocate(num_blocks, len(unseen))
        order = [*unseen, *sorted(seen)]
        return [block_id for _, block_id in sorted(zip(order, block_ids, strict=True))]

    # --- bounds -------------------------------------------------------------------------------------------

    def first_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many blocks a sequence gets to start; see ``BlockTables.first_blocks``."""
        num_held = len(sequence.block_table)
        num_missing = self.blocks_for(sequence.num_tokens) - num_held
        at_first = sequence.num_passed_blocks + self._num_seen_blocks(1) - num_held
        num_first = min(num_missing, max(0, at_first))
        return num_first, self.pool.size_of(num_missing, num_missing - num_first)

    def max_held_blocks(self, prompt: Sequence, num_sequences: int, num_tokens: int) -> int:
        """Return the largest size of the blocks that sequences of ``num_tokens`` tokens each hold at once."""
        num_blocks = num_sequences * self.blocks_for(num_tokens)
        return self.pool.size_of(num_blocks, max(0, num_blocks - self._num_seen_blocks(num_sequences)))

    def _num_seen_blocks(self, num_sequences: int) -> int:
        """Return the most blocks that the windows of sequences and the new tokens of a step take."""
        assert self.window is not None
        in_windows = num_sequences * (self.blocks_for(self.window - 1) + 2)
        return in_windows + self.max_step_tokens // self.block_size
