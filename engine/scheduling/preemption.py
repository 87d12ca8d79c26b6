"""Preemption: when blocks run out, a group gives up all of its blocks until there is room again.

``fair_blocks.py`` chooses the group. Later its blocks are copied back from host memory (``swapping.py``) or
recomputed, whichever is cheaper (PagedAttention, Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.scheduling.swapping import Swapping
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import SequenceStatus


class PreemptionCounts(NamedTuple):
    """Number of preemptions, by the way in which the groups get their blocks back."""

    swapped: int
    recomputed: int


@dataclass(eq=False)
class Preemption:
    """Takes blocks away from groups, and chooses how each group gets them back.

    Args:
        queues: the groups; a preempted group waits again.
        tables: the ledger of their blocks.
        swapping: copies blocks to host memory.
        prefers_swap: given the numbers of tokens and blocks, returns whether copying the blocks back from
            host memory is faster than recomputing the tokens.
    """

    queues: GroupQueues
    tables: BlockTables
    swapping: Swapping
    prefers_swap: Callable[[int, int], bool]
    counts: PreemptionCounts = field(default=PreemptionCounts(0, 0), init=False)

    @property
    def num_preempted(self) -> int:
        """Number of preemptions, by swapping or recomputing."""
        return sum(self.counts)

    def preempt(self, victim: SequenceGroup, schedule: Schedule) -> None:
        """Take all blocks away from a group, and plan to swap or recompute them; the group then waits."""
        victim.set_status(SequenceStatus.PREEMPTED)
        victim.drop_drafts()
        victim.num_preemptions += 1
        swapped, recomputed = self.counts
        # What this step would have brought is not there to be swapped out.
        is_incomplete = self._drop_moves_into(self.swapping.blocks(victim), schedule)
        schedule.promoted = [each for each in schedule.promoted if each[0] not in victim.sequences]
        if not is_incomplete and self._is_swapped(victim):
            self.swapping.swap_out(victim, schedule)
            self.counts = PreemptionCounts(swapped + 1, recomputed)
        else:
            self.counts = PreemptionCounts(swapped, recomputed + 1)
            for sequence in victim.sequences:
                sequence.num_computed_tokens = 0
        for sequence in victim.sequences:
            sequence.num_sealed_blocks = 0
            self.tables.free(sequence)
        self.queues.suspend_group(victim)

    def _drop_moves_into(self, block_ids: list[int], schedule: Schedule) -> bool:
        """Plan no copy and no promotion into some blocks; return whether there was any."""
        has_copies = schedule.drop_copies_into(self.tables.pool.places(block_ids))
        host_ids = schedule.drop_promotions_into(block_ids)
        if host_ids and self.tables.tiers is not None:
            self.tables.tiers.undo_promotion(self.tables.pool, host_ids)
        return has_copies or bool(host_ids)

    def _is_swapped(self, victim: SequenceGroup) -> bool:
        """Return whether to swap a group out: host memory has room, and recomputing is not cheaper."""
        num_blocks = len(self.swapping.blocks(victim))
        if num_blocks > self.swapping.num_free:
            return False
        num_tokens = sum(sequence.num_computed_tokens for sequence in victim.sequences)
        return self.prefers_swap(num_tokens, num_blocks)
