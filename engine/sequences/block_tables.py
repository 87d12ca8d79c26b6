"""The ledger of block tables: which blocks a sequence holds, finds in the cache, fills, shares and frees.

The scheduler decides whether a sequence gets blocks. This file then allocates and seals them.

Sequences of one request share blocks (PagedAttention, Kwon et al., SOSP 2023). There are three operations:
``fork`` gives a new sequence the blocks of an existing one; ``append`` gives a sequence room for more tokens,
and replaces a shared block by a copy before it is written (copy-on-write); ``free`` takes a sequence's blocks
away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.kv_cache.tiers import CacheTiers
from quire.engine.sequences.block_tokens import BlockTokens, Describe, PartialHit
from quire.engine.sequences.sequence import NO_BLOCK, Sequence, SequenceStatus

_MIN_PARTIAL_HIT = 0.25
"""Smallest matching share of a block's tokens for which copying the block is faster than computing them."""


@dataclass(eq=False)
class BlockTables:
    """Extends and shortens the tables of sequences over one pool.

    Args:
        pool: the blocks.
        block_size: tokens per block.
        window: how many tokens a token attends to, including itself; None means all tokens before it.
        max_step_tokens: most tokens of a step; they need blocks in addition to those of the window.
        tiers: the prefix cache below the pool; None means that there is none.
        describe: is told the contents of cached blocks; None: nobody is.
        has_partial_hits: whether the beginning of a cached block is of use. Blocks hold no states but those
            after their last token.
    """

    pool: BlockPool
    block_size: int
    window: int | None = None
    max_step_tokens: int = 0
    tiers: CacheTiers | None = None
    describe: Describe | None = None
    has_partial_hits: bool = True

    def __post_init__(self) -> None:
        self._block_tokens = BlockTokens(self.pool, self.describe)

    # --- the cached prefix --------------------------------------------------------------------------------

    def take_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """Start the table with the longest cached prefix of at most ``max_tokens`` tokens.

        For a sequence that is computed here, ``max_tokens`` excludes the last token, whose logits are needed.
        """
        sequence.extend_hashes(self.block_size)
        max_tokens = min(max_tokens, sequence.max_cached_tokens)
        block_ids = self.pool.look_up(sequence.block_hashes[: max_tokens // self.block_size])
        self.pool.share(block_ids)
        self._block_tokens.remember(sequence, 0, len(block_ids), self.block_size)
        self.replace(sequence, block_ids)
        sequence.num_sealed_blocks = len(block_ids)
        sequence.num_computed_tokens = 0
        self.count_cached(sequence, len(block_ids) * self.block_size)
        self.drop_unseen(sequence, sequence.num_computed_tokens)

    def num_cached_tokens(self, sequence: Sequence, max_tokens: int) -> int:
        """Return the length of the longest cached prefix of at most ``max_tokens`` tokens, in any tier."""
        usable = self.prefix_hashes(sequence)[: max_tokens // self.block_size]
        num_blocks = len(self.pool.look_up(usable))
        if self.tiers is not None:
            num_blocks += self.tiers.num_on_host(usable[num_blocks:])
        return num_blocks * self.block_size

    def partial_hit(self, sequence: Sequence) -> PartialHit | None:
        """Return a cached block that begins with the sequence's next tokens, if copying it is worthwhile."""
        if not self.has_partial_hits:
            return None
        size, index = self.block_size, len(sequence.block_table)
        end = min((index + 1) * size, sequence.num_tokens - 1, sequence.max_cached_tokens)
        hit = self._block_tokens.find(sequence.parent_hash(index), sequence.token_ids[index * size : end])
        return None if hit is None or hit.num_tokens < size * _MIN_PARTIAL_HIT else hit

    def count_cached(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens that were found in the cache as computed."""
        sequence.num_computed_tokens += num_tokens
        if sequence.status != SequenceStatus.PREEMPTED:
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def prefix_hashes(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all full blocks that a sequence may take from the cache."""
        sequence.extend_hashes(self.block_size)
        return sequence.block_hashes[: sequence.max_cached_tokens // self.block_size]

    def bring_prefix(self, sequence: Sequence) -> None:
        """Copy a prompt's blocks that are in host memory into the pool; call this only between steps."""
        if self.tiers is not None:
            self.tiers.promote_into(self.pool, self.prefix_hashes(sequence))

    # --- growing a table ----------------------------------------------------------------------------------

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """Return a new sequence that shares all blocks of ``parent``."""
        child = parent.copy(index)
        self.pool.share(child.held_blocks)
        return child

    def append(self, sequence: Sequence, num_tokens: int) -> tuple[int, int] | None:
        """Give a sequence blocks for its next ``num_tokens`` tokens; the caller has checked that they exist.

        ::

            block_table [0, 1], 6 computed tokens of a block size of 4, block 1 shared with a fork
            append 3    [0, 2, 3] and the copy (1, 2); the fork's table is still [0, 1]

        Returns:
            A shared block and its replacement in this table, if other sequences also read the block of the
            first of these tokens; else None. The caller copies the block before the tokens are written.
        """
        copy = None
        if (shared := self._shared_block(sequence)) is not None:
            [own] = self.pool.allocate(1)
            self.pool.free([shared])
            sequence.block_table[sequence.num_computed_tokens // self.block_size] = own
            sequence.num_table_edits += 1
            copy = shared, own
        num_needed = self.blocks_for(sequence.num_computed_tokens + num_tokens)
        if num_needed > len(sequence.block_table):
            sequence.block_table += self.pool.allocate(num_needed - len(sequence.block_table))
        return copy

    def num_appended_blocks(self, tokens: Iterable[tuple[Sequence, int]]) -> int:
        """Return how many blocks ``append`` allocates for these tokens, copies of shared blocks included."""
        num_new = 0
        shared_blocks = []
        for sequence, num_tokens in tokens:
            num_needed = self.blocks_for(sequence.num_computed_tokens + num_tokens)
            num_new += max(0, num_needed - len(sequence.block_table))
            if (shared := self._shared_block(sequence)) is not None:
                shared_blocks.append(shared)
        if not shared_blocks:
            return num_new
        # The last sequence that refers to a shared block writes to it without a copy.
        writers = Counter(shared_blocks)
        return num_new + sum(min(count, self.pool.ref_cnt(block) - 1) for block, count in writers.items())

    def add_block(self, sequence: Sequence) -> bool:
        """Extend a table by one block; return False if the pool has none, or the sequence has no table."""
        if not sequence.block_table or not self.pool.num_allocatable:
            return False
        sequence.block_table += self.pool.allocate(1)
        return True

    def _shared_block(self, sequence: Sequence) -> int | None:
        """Return the block that the sequence writes next if others read it too, else None."""
        index = sequence.num_computed_tokens // self.block_size
        if index >= len(sequence.block_table):
            return None
        block_id = sequence.block_table[index]
        return block_id if self.pool.ref_cnt(block_id) > 1 else None

    def replace(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Give a sequence another table; the caller has already allocated its blocks."""
        sequence.block_table = block_ids
        sequence.num_dropped_blocks = block_ids.count(NO_BLOCK)
        sequence.num_table_edits += 1

    def reserve(self, sequence: Sequence) -> None:
        """Extend the table to hold every token of the sequence.

        Raises:
            NoFreeBlocksError: there are too few blocks; the table is unchanged.
        """
        sequence.block_table += self.pool.allocate(self.num_missing(sequence))

    def allocate_swapped(
        self, sequences: Iterable[Sequence], tables: list[list[int]], num_blocks: int, max_blocks: int
    ) -> list[int] | None:
        """Allocate blocks for the tables of sequences, which are in host memory.

        Args:
            sequences: the sequences.
            tables: for each of them, the indices of its blocks in the result.
            num_blocks: number of blocks in the tables.
            max_blocks: the largest size of the blocks.

        Returns:
            The blocks; None if there is too little room.
        """
        return self.pool.allocate(num_blocks) if num_blocks <= max_blocks else None

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many more blocks a sequence needs to hold all its tokens."""
        return max(0, self.blocks_for(sequence.num_tokens) - len(sequence.block_table))

    def seal(self, sequence: Sequence) -> None:
        """Seal the blocks that became full, so that any sequence can reuse them."""
        if sequence.num_computed_tokens // self.block_size == sequence.num_sealed_blocks:
            return
        num_full = min(sequence.num_computed_tokens, sequence.num_exact_tokens) // self.block_size
        if num_full == sequence.num_sealed_blocks:
            return
        sequence.extend_hashes(self.block_size)
        self.seal_blocks(sequence, num_full)

    def seal_blocks(self, sequence: Sequence, num_full: int) -> None:
        """Seal the first ``num_full`` blocks of the table, which the caller has checked to be full."""
        for index in range(sequence.num_sealed_blocks, num_full):
            if (block_id := sequence.block_table[index]) != NO_BLOCK:
                block_hash, parent = sequence.block_hashes[index], sequence.parent_hash(index)
                sealed = self.pool.seal(block_id, block_hash, parent if index else None)
                if sealed != block_id:
                    sequence.block_table[index] = sealed
                    sequence.num_table_edits += 1
        self._block_tokens.remember(sequence, sequence.num_sealed_blocks, num_full, self.block_size)
        sequence.num_sealed_blocks = num_full

    # --- freeing blocks -----------------------------------------------------------------------------------

    def free(self, sequence: Sequence) -> None:
        """Return a sequence's blocks to the pool, where full ones remain cached."""
        self.pool.free(sequence.held_blocks)
        self.replace(sequence, [])

    def trim(self, sequence: Sequence) -> None:
        """Free the blocks that hold only rejected draft tokens."""
        num_needed = self.blocks_for(sequence.num_computed_tokens)
        if num_needed < len(sequence.block_table):
            self.pool.free(sequence.block_table[num_needed:])
            del sequence.block_table[num_needed:]
            sequence.num_table_edits += 1

    def drop_unseen(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Free the blocks that no token after the computed ones attends to.

        The table may lack the last of these blocks, if they were never transferred to this worker.
        """
        if self.window is None:
            return
        first, last = sequence.num_dropped_blocks, self._first_seen_block(num_computed_tokens)
        if last > first:
            self.pool.free(sequence.block_table[first:last])
            sequence.block_table[first:last] = [NO_BLOCK] * (last - first)
            sequence.num_dropped_blocks = last
            sequence.num_table_edits += 1

    def drop(self, sequence: Sequence, indices: list[int]) -> None:
        """Free the blocks at some indices of a table."""
        if not indices:
            return
        table = sequence.block_table
        self.pool.free([table[index] for index in sorted(indices)])
        for index in indices:
            table[index] = NO_BLOCK
        sequence.num_dropped_blocks += len(indices)
        sequence.num_table_edits += 1

    # --- bounds -------------------------------------------------------------------------------------------

    def first_blocks(self, sequence: Sequence) -> tuple[int, int]:
        """Return how many blocks a sequence gets to start, after its cached prefix.

        These are blocks for all its tokens, or the most that it can hold at once.

        Returns:
            Their number, and the size of the blocks for which there must be room.
        """
        num_held = self.max_held_blocks(sequence, 1, sequence.num_tokens)
        last = min(self.blocks_for(sequence.num_tokens), sequence.num_dropped_blocks + num_held)
        num_missing = last - len(sequence.block_table)
        return num_missing, num_missing

    def max_blocks(self, prompt: Sequence, num_tokens: int) -> int:
        """Return the most blocks that a request can hold with ``num_tokens`` tokens in each sequence."""
        num_sequences = prompt.params.num_sequences
        shared = prompt.num_prompt_tokens // self.block_size
        at_end = shared + num_sequences * (self.blocks_for(num_tokens) - shared)
        return min(at_end, self.max_held_blocks(prompt, num_sequences, num_tokens))

    def max_held_blocks(self, prompt: Sequence, num_sequences: int, num_tokens: int) -> int:
        """Return the most blocks that sequences of ``num_tokens`` tokens each hold at once.

        The bound does not rely on shared blocks, which may have been freed.
        """
        at_end = num_sequences * self.blocks_for(num_tokens)
        budget = prompt.kv_budget
        if budget is not None and not prompt.stops_after_prefill:
            in_prompt, in_budget = (
                self.blocks_for(prompt.num_prompt_tokens),
                budget // self.block_size,
            )
            several = in_prompt + num_sequences * in_budget
            return min(at_end, max(in_prompt, in_budget) if num_sequences == 1 else several)
        if self.window is None:
            return at_end
        # Both a window and the new tokens of a step may begin and end in the middle of a block.
        in_windows = num_sequences * (self.blocks_for(self.window - 1) + 2)
        return min(at_end, in_windows + self.max_step_tokens // self.block_size)

    def _first_seen_block(self, position: int) -> int:
        """Return the index of the first block that a token at ``position`` attends to."""
        assert self.window is not None
        return max(0, position + 1 - self.window) // self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks ``num_tokens`` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)
