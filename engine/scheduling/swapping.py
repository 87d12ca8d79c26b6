"""Swapping: copies a preempted group's blocks to host memory and back, and measures what that costs."""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import SequenceGroup, SwappedTables
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import NO_BLOCK

_FIRST_COPY_BYTES_PER_SECOND = 2e9
"""Assumed speed of copies until the first swap has been measured."""
_MIN_TOKENS = 32
"""Smaller steps are not measured, since they say little about the time to recompute a prompt."""
_WEIGHT = 0.2
"""Weight of the latest measurement in the running mean."""


class Swapping:
    """Moves the blocks of groups between the pool and host memory; a block that sequences share moves once.

    Args:
        queues: knows how many blocks of the pool a group may take.
        tables: the ledger of the groups' blocks.
        swap_space: the ledger of host blocks.
    """

    def __init__(self, queues: GroupQueues, tables: BlockTables, swap_space: SwapSpace) -> None:
        self._queues = queues
        self._tables = tables
        self._swap_space = swap_space

    @property
    def num_free(self) -> int:
        """Number of host blocks that are free."""
        return self._swap_space.num_free

    def blocks(self, group: SequenceGroup) -> list[int]:
        """Return the blocks with computed tokens, which ``swap_out`` would copy."""
        return _distinct_blocks(self._computed_tables(group))

    def swap_out(self, group: SequenceGroup, schedule: Schedule) -> None:
        """Plan to copy a group's blocks to host memory.

        Args:
            group: the group, whose ``blocks`` are at most ``num_free``; the caller frees its tables.
            schedule: gets the copies.
        """
        computed = self._computed_tables(group)
        block_ids = _distinct_blocks(computed)
        host_ids = self._swap_space.allocate(len(block_ids))
        schedule.swap_out += self._tables.pool.copies_to_host(zip(block_ids, host_ids, strict=True))
        index_of = {NO_BLOCK: NO_BLOCK, **{block_id: index for index, block_id in enumerate(block_ids)}}
        tables = [[index_of[block_id] for block_id in table] for table in computed]
        group.swapped = SwappedTables(host_ids, tables)

    def swap_in(
        self, group: SequenceGroup, schedule: Schedule, num_next_blocks: Callable[[SequenceGroup], int]
    ) -> bool:
        """Plan to copy a group's blocks back; return False if there is no room for them and its next tokens.

        Args:
            group: the group, whose blocks are in host memory.
            schedule: gets the copies.
            num_next_blocks: called when the group has tables; returns how many more blocks its next tokens
                take.
        """
        assert group.swapped is not None
        host_ids, tables = group.swapped
        pool = self._tables.pool
        block_ids = self._tables.allocate_swapped(
            group.sequences, tables, len(host_ids), self._queues.num_spare_blocks
        )
        if block_ids is None:
            return False
        for sequence, table in zip(group.sequences, tables, strict=True):
            held = [block_ids[index] if index != NO_BLOCK else NO_BLOCK for index in table]
            self._tables.replace(sequence, held)
            pool.share(sequence.held_blocks)
        pool.free(block_ids)
        if num_next_blocks(group) > self._queues.num_spare_blocks:
            for sequence in group.sequences:
                self._tables.free(sequence)
            return False
        copies = pool.copies_to_host(zip(block_ids, host_ids, strict=True))
        schedule.swap_in += [(host, place) for place, host in copies]
        self._swap_space.free_after_step(host_ids)
        # A beam without blocks may wait for those of another one, which computes nothing before all can.
        for sequence in group.sequences:
            num_exact = min(sequence.num_computed_tokens, sequence.num_exact_tokens)
            schedule.promoted.append((sequence, num_exact // self._tables.block_size))
        group.swapped = None
        return True

    def _computed_tables(self, group: SequenceGroup) -> list[list[int]]:
        """Return the part of each sequence's block table that contains computed tokens."""
        return [s.block_table[: self._tables.blocks_for(s.num_computed_tokens)] for s in group.sequences]


def _distinct_blocks(tables: list[list[int]]) -> list[int]:
    return list(dict.fromkeys(block_id for table in tables for block_id in table if block_id != NO_BLOCK))


class SwapCost:
    """Keeps running means of the time to compute a token and of the time to copy a block.

    Args:
        block_bytes: bytes of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_seconds = block_bytes / _FIRST_COPY_BYTES_PER_SECOND
        self._token_seconds = 0.0

    def record_forward(self, num_tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a forward pass."""
        if num_tokens >= _MIN_TOKENS:
            self._token_seconds = _mean(self._token_seconds, seconds / num_tokens)

    def record_swap(self, num_blocks: int, seconds: float) -> None:
        """Record how many blocks were copied between pool and host, and in how many seconds."""
        if num_blocks:
            self._block_seconds = _mean(self._block_seconds, seconds / num_blocks)

    def prefers_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """Return whether copying the blocks out and back is faster than recomputing the tokens."""
        return 2 * num_blocks * self._block_seconds < num_tokens * self._token_seconds


def _mean(before: float, latest: float) -> float:
    return latest if before == 0.0 else (1 - _WEIGHT) * before + _WEIGHT * latest
