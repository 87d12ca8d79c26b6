"""Gives a starting sequence its blocks: the cached prefix, from the pool or a tier below it, and new blocks.

::

    [ full blocks in the pool | full blocks in host memory, or a copy of a block that matches in part | new ]

A sequence that was preempted and is recomputed starts in the same way.
"""

from __future__ import annotations

from quire.engine.kv_cache.tiers import CacheTiers
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import Lack, SequenceGroup
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.block_tokens import PartialHit
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import Sequence, SequenceStatus


class FirstBlocks:
    """Allocates the blocks of groups without blocks.

    Args:
        queues: the groups of the engine.
        tables: the ledger of their blocks.
        tiers: the prefix cache below the pool; None means that there is none.
    """

    def __init__(self, queues: GroupQueues, tables: BlockTables, tiers: CacheTiers | None) -> None:
        self._queues = queues
        self._tables = tables
        self._pool = tables.pool
        self._tiers = tiers

    def is_loading(self, group: SequenceGroup) -> bool:
        """Return whether a prompt's blocks are being read from disk; the first call starts the reads."""
        if self._tiers is None or group.holds_blocks or group.swapped is not None:
            return False
        if group.prefetch is None:
            group.prefetch = self._tiers.prefetch(self._tables.prefix_hashes(group.sequences[0]))
        return group.is_loading

    def allocate_for(self, group: SequenceGroup, schedule: Schedule) -> bool:
        """Give a group's first sequence blocks for all its tokens, or the most that it can hold at once.

        Returns:
            Whether it got them. It gets no blocks if there are too few, or if a running sequence is about to
            seal the block that this sequence would compute next.
        """
        if self._still_lacks_blocks(group) or self._still_waits_for_block(group):
            return False
        sequence, num_allocatable = group.sequences[0], self._pool.num_allocatable
        self._tables.take_cached_prefix(sequence, max_tokens=sequence.num_tokens - 1)
        num_first, num_missing = self._tables.first_blocks(sequence)
        num_revived = num_allocatable - self._pool.num_allocatable
        is_lacking = num_missing > self._queues.num_spare_blocks
        group.lack = Lack(num_missing + num_revived, self._next_hash(sequence)) if is_lacking else None
        index = len(sequence.block_table)
        group.awaited = index if self._is_being_computed(sequence, index) else None
        if is_lacking or group.awaited is not None:
            self._tables.free(sequence)
            sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
            return False
        self._allocate(sequence, num_first, schedule)
        return True

    def _still_lacks_blocks(self, group: SequenceGroup) -> bool:
        """Return whether a group surely still lacks blocks, without the slow matching of its whole prompt."""
        lack = group.lack
        if lack is None or not self._queues.running:
            return False
        return lack.num_blocks > self._queues.num_spare_blocks and not self._pool.look_up(lack.next_hash)

    def _still_waits_for_block(self, group: SequenceGroup) -> bool:
        """Return whether another sequence still computes the block that a group waits for."""
        sequence, index = group.sequences[0], group.awaited
        if index is None or self._pool.look_up(sequence.block_hashes[index : index + 1]):
            return False
        return self._is_being_computed(sequence, index)

    def _next_hash(self, sequence: Sequence) -> list[bytes]:
        """Return a list with the hash of the first block after the cached prefix; [] if it is unusable."""
        index = len(sequence.block_table)
        return sequence.block_hashes[index : min(index + 1, self._num_usable_blocks(sequence))]

    def _num_usable_blocks(self, sequence: Sequence) -> int:
        """Return how many full blocks a sequence may take from a cache; it must compute its last token."""
        return min(sequence.num_tokens - 1, sequence.max_cached_tokens) // self._tables.block_size

    def _is_being_computed(self, sequence: Sequence, index: int) -> bool:
        """Return whether a running sequence will soon seal the block at an index of this one."""
        if index >= self._num_usable_blocks(sequence):
            return False
        running = (other for group in self._queues.running for other in group.sequences)
        return any(
            index < len(other.block_hashes) and other.block_hashes[index] == sequence.block_hashes[index]
            for other in running
            if other.num_sealed_blocks <= index < other.num_exact_tokens // self._tables.block_size
        )

    def _allocate(self, sequence: Sequence, num_blocks: int, schedule: Schedule) -> None:
        """Extend a table by blocks; the first of them may get their content by a copy from host memory."""
        # A sequence that frees blocks before it has all of them needs allocations in later steps, which may
        # fail. Such a sequence takes no blocks from host memory.
        is_whole = len(sequence.block_table) + num_blocks == self._tables.blocks_for(sequence.num_tokens)
        # Do this before the allocation, whose evictions may push these blocks out of host memory.
        host_ids = self._take_from_host(sequence, num_blocks, schedule) if is_whole else []
        hit = None if host_ids else self._pin_partial_hit(sequence, num_blocks)
        new_blocks = self._pool.allocate(num_blocks)
        if host_ids:
            schedule.promotions += zip(host_ids, new_blocks, strict=False)
            schedule.promoted.append((sequence, len(sequence.block_table) + len(host_ids)))
        sequence.block_table += new_blocks
        if hit is not None:
            schedule.pinned.append(hit.block_id)
            target = sequence.block_table[sequence.num_sealed_blocks]
            schedule.copies += self._pool.copies([(hit.block_id, target)])
            self._tables.count_cached(sequence, hit.num_tokens)

    def _take_from_host(self, sequence: Sequence, max_blocks: int, schedule: Schedule) -> list[int]:
        """Return the cached host blocks that follow a sequence's table, and count their tokens as computed.

        The pool's blocks are sealed after the copy. Until then they have no content that could be evicted.
        """
        if self._tiers is None:
            return []
        first = len(sequence.block_table)
        usable = sequence.block_hashes[first : self._num_usable_blocks(sequence)][:max_blocks]
        self._tiers.counts.hits["pool"] += first
        num_on_host = self._tiers.num_on_host(usable)
        if not num_on_host or not self._pin_dropped(sequence, max_blocks, schedule):
            return []
        host_ids = self._tiers.begin_promotion(usable[:num_on_host])
        num_tokens = len(host_ids) * self._tables.block_size
        self._tables.count_cached(sequence, num_tokens)
        if sequence.status != SequenceStatus.PREEMPTED:
            sequence.num_promoted_tokens = num_tokens
        return host_ids

    def _pin_dropped(self, sequence: Sequence, num_new_blocks: int, schedule: Schedule) -> bool:
        """Pin cached blocks that the window has dropped, until the step's blocks have been moved.

        They are the parents of blocks from host memory. Without a reference, the allocation of new blocks
        could evict them, and their children could then not be sealed.

        Returns:
            Whether the new blocks still fit; otherwise nothing is pinned.
        """
        dropped = self._pool.look_up(sequence.block_hashes[: sequence.num_dropped_blocks])
        self._pool.share(dropped)
        if num_new_blocks > self._pool.num_allocatable:
            self._pool.free(dropped)
            return False
        schedule.pinned += dropped
        return True

    def _pin_partial_hit(self, sequence: Sequence, num_new_blocks: int) -> PartialHit | None:
        """Pin and return a cached block whose leading tokens are the sequence's next tokens, if there is one.

        The sequence gets a copy of the block. It seals the copy once all tokens in it are computed.
        """
        hit = self._tables.partial_hit(sequence)
        if hit is None:
            return None
        self._pool.share([hit.block_id])
        if num_new_blocks > self._pool.num_allocatable:
            self._pool.free([hit.block_id])
            return None
        return hit
