"""Preemption: when blocks run out, the newest group gives up all of its blocks until there is room again.

They are then copied back from host memory (swapped) or recomputed, whichever is cheaper (PagedAttention, Kwon
et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.engine.block_tables import BlockTables
from quire.engine.group_queues import GroupQueues
from quire.engine.schedule import Schedule
from quire.engine.sequence import NO_BLOCK, SequenceStatus
from quire.engine.sequence_group import SequenceGroup, SwappedTables
from quire.engine.swap_space import SwapSpace

PREEMPTION_MODES = ("auto", "swap", "recompute")


class PreemptionCounts(NamedTuple):
    """How often groups were preempted, by the way in which they get their blocks back."""

    swapped: int
    recomputed: int


class Preemption:
    """Takes the blocks of groups, and brings swapped blocks back.

    Args:
        mode: "swap" copies blocks to host memory if there is room, "recompute" computes them again, "auto"
            chooses the faster way.
        queues: the groups; a preempted group waits again.
        tables: the ledger of their blocks.
        swap_space: host blocks for preempted groups.
        prefers_swap: gets numbers of tokens and blocks, and returns whether it is faster to copy the blocks
            back from host memory than to recompute the tokens.
    """

    def __init__(
        self,
        mode: str,
        queues: GroupQueues,
        tables: BlockTables,
        swap_space: SwapSpace,
        prefers_swap: Callable[[int, int], bool],
    ) -> None:
        self.counts = PreemptionCounts(0, 0)
        self.prefers_swap = prefers_swap
        self._mode = mode
        self._queues = queues
        self._tables = tables
        self._swap_space = swap_space

    @property
    def num_preempted(self) -> int:
        """How often groups were preempted, whether swapped out or recomputed."""
        return sum(self.counts)

    def newest_victim(self) -> SequenceGroup | None:
        """Return the newest group that can be preempted; None if there is none."""
        groups = (*self._queues.running, *self._queues.waiting)
        victims = (group for group in groups if group.is_preemptible)
        return max(victims, key=lambda group: group.arrival, default=None)

    def preempt(self, victim: SequenceGroup, schedule: Schedule) -> None:
        """Take all blocks of a group, and plan to swap them out or to recompute them; the group waits."""
        victim.set_status(SequenceStatus.PREEMPTED)
        victim.drop_drafts()
        swapped, recomputed = self.counts
        if self._swap_out(victim, schedule):
            self.counts = PreemptionCounts(swapped + 1, recomputed)
        else:
            self.counts = PreemptionCounts(swapped, recomputed + 1)
            for sequence in victim.sequences:
                sequence.num_computed_tokens = 0
        for sequence in victim.sequences:
            sequence.num_sealed_blocks = 0
            self._tables.free(sequence)
        self._queues.suspend_group(victim)

    def _swap_out(self, victim: SequenceGroup, schedule: Schedule) -> bool:
        """Plan to copy a group's blocks to host memory, each once; return whether they are swapped out.

        They are not if host memory lacks room, or if recomputing is configured or cheaper.
        """
        computed = [s.block_table[: self._tables.blocks_for(s.num_computed_tokens)] for s in victim.sequences]
        block_ids = list(dict.fromkeys(b for table in computed for b in table if b != NO_BLOCK))
        num_tokens = sum(s.num_computed_tokens for s in victim.sequences)
        if self._mode == "recompute" or len(block_ids) > self._swap_space.num_free:
            return False
        if self._mode == "auto" and not self.prefers_swap(num_tokens, len(block_ids)):
            return False
        host_ids = self._swap_space.allocate(len(block_ids))
        schedule.swap_out += zip(block_ids, host_ids, strict=True)
        index_of = {NO_BLOCK: NO_BLOCK, **{block_id: index for index, block_id in enumerate(block_ids)}}
        tables = [[index_of[block_id] for block_id in table] for table in computed]
        victim.swapped = SwappedTables(host_ids, tables)
        return True

    def swap_in(
        self, group: SequenceGroup, schedule: Schedule, num_next_blocks: Callable[[SequenceGroup], int]
    ) -> bool:
        """Plan to copy a group's blocks back; return False if they and its next tokens do not all fit.

        Args:
            group: the group, whose blocks are in host memory.
            schedule: gets the copies.
            num_next_blocks: returns how many more blocks the group's next tokens take, once it has tables.
        """
        assert group.swapped is not None
        host_ids, tables = group.swapped
        if len(host_ids) > self._queues.num_spare_blocks:
            return False
        pool = self._tables.pool
        block_ids = pool.allocate(len(host_ids))
        for sequence, table in zip(group.sequences, tables, strict=True):
            sequence.block_table = [block_ids[index] if index != NO_BLOCK else NO_BLOCK for index in table]
            pool.share(sequence.held_blocks)
        pool.free(block_ids)
        if num_next_blocks(group) > self._queues.num_spare_blocks:
            for sequence in group.sequences:
                self._tables.free(sequence)
            return False
        schedule.swap_in += zip(host_ids, block_ids, strict=True)
        self._swap_space.free_after_step(host_ids)
        group.swapped = None
        return True
