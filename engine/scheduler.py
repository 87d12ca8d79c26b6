"""Decides what each step computes: first come first served, under a token budget.

There is no prefill phase and no decode phase. A sequence has tokens that are not computed yet: many for a
new prompt, one for a sequence that decodes. Each step takes the oldest groups first and computes as many of
those tokens as the budget allows; a long prompt is thus prefilled in chunks beside running decodes.

When blocks run out, the newest group gives up all of its own, and comes back when there is room for all of
them: from host memory, or by computing them again, whichever is cheaper (PagedAttention, section 4.5).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.engine.block_pool import BlockPool
from quire.engine.block_tables import BlockTables
from quire.engine.cache_tiers import CacheTiers
from quire.engine.group import SequenceGroup, SwappedTables
from quire.engine.partial_hits import PartialHit
from quire.engine.sequence import NO_BLOCK, Sequence, SequenceStatus
from quire.engine.swap_space import SwapSpace

PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and what becomes of a preempted group."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    preemption: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or a full batch cannot decode in one step"
            )
        if self.preemption not in PREEMPTION_MODES:
            raise ValueError(f"preemption must be one of {PREEMPTION_MODES}, got {self.preemption!r}")


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its tokens this step computes, its guesses among them."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def num_drawn(self) -> int:
        """Rows of logits that tokens may be drawn from: after its last token and after each guess."""
        return 1 + len(self.sequence.draft_token_ids)


@dataclass(slots=True)
class Schedule:
    """What one step does: moves blocks, in this order, and computes tokens.

    Attributes:
        swap_out: (block, host block) to copy to host memory.
        swap_in: (host block, block) to copy back.
        copies: (block, block) to copy before the second is written.
        lent: cached blocks that are held until all have been copied.
        promotions: (host block, block) to copy from the prefix cache in host memory.
        promoted: whose tables these are, and up to which block they are full then.
        sequences: what to compute.
        admitted: groups among them that were waiting before, whether new or preempted.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    lent: list[int] = field(default_factory=list)
    promotions: list[tuple[int, int]] = field(default_factory=list)
    promoted: list[tuple[Sequence, int]] = field(default_factory=list)
    sequences: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[SequenceGroup] = field(default_factory=list)

    @property
    def moves_blocks(self) -> bool:
        """Whether anything is to be copied."""
        return bool(self.swap_out or self.swap_in or self.copies or self.promotions)


class PreemptionCounts(NamedTuple):
    """How often groups were preempted."""

    swapped: int
    recomputed: int


class Scheduler:
    """Moves groups between waiting and running and gives them blocks.

    Args:
        tables: what sequences hold of the pool.
        swap_space: host blocks for preempted groups; None means none.
        tiers: the prefix cache below the pool; None means none.
        prefers_swap: whether bringing (tokens, blocks) back from host memory beats computing them again.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        tables: BlockTables,
        swap_space: SwapSpace | None = None,
        prefers_swap: Callable[[int, int], bool] = lambda num_tokens, num_blocks: True,
        tiers: CacheTiers | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.tables = tables
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.preemptions = PreemptionCounts(0, 0)
        self._swap_space = swap_space or SwapSpace(0)
        self._prefers_swap = prefers_swap
        self._tiers = tiers
        self._num_arrived = 0
        self._next = Schedule()
        self._draft_budget = 0

    @property
    def num_preemptions(self) -> int:
        """How often groups were preempted, either way."""
        return sum(self.preemptions)

    # --- the queues ---------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group, or one whose blocks were computed elsewhere and are in its table."""
        self.stamp_arrival(group)
        self._wait(group)

    def _wait(self, group: SequenceGroup) -> None:
        """Queue a group in the order of arrival: a transfer may end after one that began later."""
        insort(self.waiting, group, key=lambda g: g.arrival)

    def stamp_arrival(self, group: SequenceGroup) -> None:
        """Give a group its place in the order; the first stamp holds."""
        if not group.arrival:
            self._num_arrived += 1
            group.arrival = self._num_arrived

    def finish(self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus) -> None:
        """End a sequence in any state and free its blocks, unless they wait to be released."""
        sequence.status = status
        if sequence.stops_after_prefill and status != SequenceStatus.FINISHED_ABORTED:
            self._leave_queues(group)
            return
        group.free(sequence, self.pool)
        group.sequences.remove(sequence)
        if not group.sequences:
            self._leave_queues(group)

    def discard(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """End all sequences of a group and free what they hold, here and in host memory."""
        self._leave_queues(group)
        if group.swapped is not None:
            self._swap_space.free(group.swapped.host_ids)
            group.swapped = None
        for sequence in group.sequences:
            sequence.status = status
            group.free(sequence, self.pool)
        group.sequences.clear()

    def _leave_queues(self, group: SequenceGroup) -> None:
        if group in self.running:
            self.running.remove(group)
        elif group in self.waiting:
            self.waiting.remove(group)

    # --- one step -----------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Choose the tokens of the next step and make sure their blocks exist."""
        self._next = step = Schedule()
        budget = self.config.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        # Guesses leave every running sequence its place.
        self._draft_budget = max(0, budget - sum(len(group.sequences) for group in self.running))
        # Oldest first: a victim is always newer, so it is not among those already scheduled.
        for group in self.running[:]:
            if group not in self.running:
                continue
            wanted = self._wanted(group, budget)
            num_drafted = group.num_drafted_tokens
            if num_drafted and self._num_missing(wanted) > self.pool.num_allocatable:
                group.drop_drafts()  # nobody is preempted for a guess
                wanted, num_drafted = self._wanted(group, budget), 0
            if wanted and self._make_room(group, wanted):
                self._append(wanted)
                step.sequences += wanted
                self._draft_budget -= num_drafted
                budget -= sum(each.num_scheduled_tokens for each in wanted)
        # Admitting beside groups that were in need of blocks would only preempt again.
        if self.num_preemptions == num_preemptions or not self.running:
            self._admit_waiting(budget)
        return step

    def _admit_waiting(self, budget: int) -> None:
        num_slots = sum(group.num_slots for group in self.running)
        for group in list(self.waiting):
            if self._is_loading(group):
                continue
            num_slots += group.num_slots
            if not budget or num_slots > self.config.max_num_seqs:
                return
            is_preemptible = group.is_preemptible
            wanted = self._admit(group, budget)
            # With nobody running, those that wait behind it with blocks would keep them for ever.
            while wanted is None and not self.running and self._preempt_newer(group):
                wanted = self._admit(group, budget)
            if wanted is None:
                # So would it, while a transfer waits for these blocks and holds what this group lacks.
                if is_preemptible and not self.running:
                    self._preempt(group)
                return
            self.waiting.remove(group)
            insort(self.running, group, key=lambda g: g.arrival)
            self._next.sequences += wanted
            self._next.admitted.append(group)
            budget -= sum(each.num_scheduled_tokens for each in wanted)

    def _wanted(self, group: SequenceGroup, budget: int) -> list[ScheduledSequence]:
        """Return what to compute of a group.

        Beams advance together: all of their last tokens in one step, or none.
        """
        started = self._started(group)
        num_kept_back = 0
        if group.beam is not None and group.is_forked:
            if any(s.num_tokens - s.num_computed_tokens > 1 for s in group.sequences):
                num_kept_back = 1
            elif len(group.sequences) > budget:
                return []
        draft_budget = self._draft_budget
        wanted = []
        for sequence in started:
            num_tokens = min(sequence.max_step_tokens(self.config.block_size), budget)
            if num_kept_back:
                num_tokens = min(num_tokens, sequence.num_tokens - sequence.num_computed_tokens - 1)
            if sequence.draft_token_ids:
                del sequence.draft_token_ids[max(0, min(draft_budget, budget - num_tokens)) :]
                draft_budget -= len(sequence.draft_token_ids)
                num_tokens += len(sequence.draft_token_ids)
            if num_tokens > 0:
                wanted.append(ScheduledSequence(sequence, num_tokens))
                budget -= num_tokens
        return wanted

    def _started(self, group: SequenceGroup) -> list[Sequence]:
        """Return the sequences of a group that can be computed.

        Those that compute everything again wait for the first to seal what they share with it, or each would
        compute the prompt and hold blocks of its own for it.
        """
        first, *others = group.sequences
        started = [first]
        for sequence in others:
            if not sequence.block_table:
                if first.num_sealed_blocks < first.num_prompt_tokens // self.config.block_size:
                    continue
                self.tables.take_cached_prefix(sequence, max_tokens=sequence.num_tokens - 1)
            started.append(sequence)
        return started

    def _make_room(self, group: SequenceGroup, wanted: list[ScheduledSequence]) -> bool:
        """Preempt newer groups until there are blocks for the wanted tokens."""
        while self._num_missing(wanted) > self.pool.num_allocatable:
            victim = self._newest_holder()
            if victim is None:
                return False  # blocks of a transfer in flight come back or turn into a running group
            self._preempt(victim)
            if victim is group:
                return False
        return True

    def _append(self, wanted: list[ScheduledSequence]) -> None:
        """Extend the tables by the wanted tokens; copy shared blocks that are about to be written."""
        for sequence, num_tokens in wanted:
            if (shared := self._shared_block(sequence)) is not None:
                [own] = self.pool.allocate(1)
                self.pool.free([shared])
                sequence.block_table[sequence.num_computed_tokens // self.config.block_size] = own
                self._next.copies.append((shared, own))
            num_needed = self.tables.blocks_for(sequence.num_computed_tokens + num_tokens)
            if num_needed > len(sequence.block_table):
                sequence.block_table += self.pool.allocate(num_needed - len(sequence.block_table))

    def _num_missing(self, wanted: list[ScheduledSequence]) -> int:
        """Return how many blocks the wanted tokens take, copies of shared blocks included."""
        num_new = 0
        shared_blocks = []
        for sequence, num_tokens in wanted:
            num_needed = self.tables.blocks_for(sequence.num_computed_tokens + num_tokens)
            num_new += max(0, num_needed - len(sequence.block_table))
            if (shared := self._shared_block(sequence)) is not None:
                shared_blocks.append(shared)
        if not shared_blocks:
            return num_new
        # The last of a block's owners may keep it.
        writers = Counter(shared_blocks)
        return num_new + sum(min(count, self.pool.ref_cnt(block) - 1) for block, count in writers.items())

    def _shared_block(self, sequence: Sequence) -> int | None:
        """Return the block that the sequence writes next, if others read it."""
        index = sequence.num_computed_tokens // self.config.block_size
        if index >= len(sequence.block_table):
            return None
        block_id = sequence.block_table[index]
        return block_id if self.pool.ref_cnt(block_id) > 1 else None

    # --- preemption ---------------------------------------------------------------------------------------

    def _newest_holder(self) -> SequenceGroup | None:
        """Return the newest group whose blocks can be taken."""
        holders = (group for group in (*self.running, *self.waiting) if group.is_preemptible)
        return max(holders, key=lambda group: group.arrival, default=None)

    def _preempt_newer(self, group: SequenceGroup) -> bool:
        """Preempt the newest group that holds blocks, if it is newer."""
        victim = self._newest_holder()
        if victim is None or victim.arrival <= group.arrival:
            return False
        self._preempt(victim)
        return True

    def _preempt(self, victim: SequenceGroup) -> None:
        """Take all blocks of a group."""
        victim.set_status(SequenceStatus.PREEMPTED)
        victim.drop_drafts()
        swapped, recomputed = self.preemptions
        if self._swap_out(victim):
            self.preemptions = PreemptionCounts(swapped + 1, recomputed)
        else:
            self.preemptions = PreemptionCounts(swapped, recomputed + 1)
            for sequence in victim.sequences:
                sequence.num_computed_tokens = 0
        for sequence in victim.sequences:
            sequence.num_sealed_blocks = 0
            victim.free(sequence, self.pool)
        if victim in self.running:
            self.running.remove(victim)
            self._wait(victim)

    def _swap_out(self, victim: SequenceGroup) -> bool:
        """Plan to copy a group's blocks to host memory, each once, if that is wanted and there is room."""
        computed = [s.block_table[: self.tables.blocks_for(s.num_computed_tokens)] for s in victim.sequences]
        block_ids = list(dict.fromkeys(b for table in computed for b in table if b != NO_BLOCK))
        num_tokens = sum(s.num_computed_tokens for s in victim.sequences)
        mode = self.config.preemption
        if mode == "recompute" or len(block_ids) > self._swap_space.num_free:
            return False
        if mode == "auto" and not self._prefers_swap(num_tokens, len(block_ids)):
            return False
        host_ids = self._swap_space.allocate(len(block_ids))
        self._next.swap_out += zip(block_ids, host_ids, strict=True)
        place = {NO_BLOCK: NO_BLOCK, **{block_id: index for index, block_id in enumerate(block_ids)}}
        tables = [[place[block_id] for block_id in table] for table in computed]
        victim.swapped = SwappedTables(host_ids, tables)
        return True

    def _swap_in(self, group: SequenceGroup, swapped: SwappedTables, budget: int) -> bool:
        """Plan to copy a group's blocks back, if all fit and its next tokens too."""
        if len(swapped.host_ids) > self.pool.num_allocatable:
            return False
        block_ids = self.pool.allocate(len(swapped.host_ids))
        for sequence, table in zip(group.sequences, swapped.tables, strict=True):
            sequence.block_table = [block_ids[place] if place != NO_BLOCK else NO_BLOCK for place in table]
            self.pool.share(sequence.held_blocks)
        self.pool.free(block_ids)
        if self._num_missing(self._wanted(group, budget)) > self.pool.num_allocatable:
            for sequence in group.sequences:
                group.free(sequence, self.pool)
            return False
        self._next.swap_in += zip(swapped.host_ids, block_ids, strict=True)
        self._swap_space.free_after_step(swapped.host_ids)
        group.swapped = None
        return True

    # --- admission ----------------------------------------------------------------------------------------

    def _admit(self, group: SequenceGroup, budget: int) -> list[ScheduledSequence] | None:
        """Give a waiting group its blocks: those in host memory or of its cached prefix, and new ones.

        Returns:
            What to compute of it in this step; None if it cannot be admitted.
        """
        if group.swapped is not None and not self._swap_in(group, group.swapped, budget):
            return None
        if not group.holds_blocks and not self._begin(group.sequences[0]):
            return None
        wanted = self._wanted(group, budget)
        if self._num_missing(wanted) > self.pool.num_allocatable:
            return None
        self._append(wanted)
        is_prefill = group.num_uncomputed_tokens > len(group.sequences)
        group.set_status(SequenceStatus.PREFILLING if is_prefill else SequenceStatus.DECODING)
        return wanted

    def _begin(self, sequence: Sequence) -> bool:
        """Give a sequence blocks for all its tokens, or as many as it can ever hold at once.

        Returns:
            False, and no blocks, if there are too few or another sequence is computing its next block now.
        """
        self.tables.take_cached_prefix(sequence, max_tokens=sequence.num_tokens - 1)
        num_wanted = self.tables.max_held_blocks(sequence, 1, sequence.num_tokens)
        last = min(self.tables.blocks_for(sequence.num_tokens), sequence.num_dropped_blocks + num_wanted)
        num_missing = last - len(sequence.block_table)
        # Of a sequence that gives blocks back before it has all of them, later steps may not find room.
        is_whole = last == self.tables.blocks_for(sequence.num_tokens)
        if num_missing > self.pool.num_allocatable or self._is_being_computed(sequence):
            self.pool.free(sequence.held_blocks)
            sequence.block_table.clear()
            sequence.num_computed_tokens = sequence.num_sealed_blocks = sequence.num_dropped_blocks = 0
            return False
        # Before the allocation, whose evictions may push them out of host memory.
        host_ids = self._take_from_host(sequence, num_missing) if is_whole else []
        hit = None if host_ids else self._hold_partial_hit(sequence, num_missing)
        new_blocks = self.pool.allocate(num_missing)
        if host_ids:
            self._next.promotions += zip(host_ids, new_blocks, strict=False)
            self._next.promoted.append((sequence, len(sequence.block_table) + len(host_ids)))
        sequence.block_table += new_blocks
        if hit is not None:
            self._next.lent.append(hit.block_id)
            self._next.copies.append((hit.block_id, sequence.block_table[sequence.num_sealed_blocks]))
            self.tables.count_cached(sequence, hit.num_tokens)
        return True

    def _hold_partial_hit(self, sequence: Sequence, num_new_blocks: int) -> PartialHit | None:
        """Reference a cached block that begins as the sequence goes on, if a copy saves some of its tokens.

        Its copy is the sequence's own, and is sealed like any other block: once all its tokens are computed.
        """
        hit = self.tables.partial_hit(sequence)
        if hit is None:
            return None
        self.pool.share([hit.block_id])
        if num_new_blocks > self.pool.num_allocatable:
            self.pool.free([hit.block_id])
            return None
        return hit

    def moved(self, schedule: Schedule) -> None:
        """Note that a step's blocks have been moved."""
        self._swap_space.step_done()
        for sequence, num_full in schedule.promoted:
            self.tables.seal_blocks(sequence, num_full)
        self.pool.free(schedule.lent)

    def _take_from_host(self, sequence: Sequence, max_blocks: int) -> list[int]:
        """Return the host blocks that go on where a sequence's table ends, and count them as computed.

        They are sealed when they have been copied: until then they have no content that could be evicted.
        """
        if self._tiers is None:
            return []
        first = len(sequence.block_table)
        max_tokens = min(sequence.num_tokens - 1, sequence.max_cached_tokens)
        wanted = sequence.block_hashes[first : max_tokens // self.config.block_size][:max_blocks]
        self._tiers.counts.hits["pool"] += first
        num_held = self._tiers.num_on_host(wanted)
        if not num_held or not self._hold_dropped(sequence, max_blocks):
            return []
        host_ids = self._tiers.lend(wanted[:num_held])
        num_tokens = len(host_ids) * self.config.block_size
        self.tables.count_cached(sequence, num_tokens)
        if sequence.status != SequenceStatus.PREEMPTED:
            sequence.num_promoted_tokens = num_tokens
        return host_ids

    def _hold_dropped(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Reference what a window has dropped of a cached prefix until the step's blocks have been moved.

        Those that come from host memory follow it, and could not be sealed if it were evicted for them.

        Returns:
            False, and no references, if the new blocks would not fit then.
        """
        dropped = self.pool.look_up(sequence.block_hashes[: sequence.num_dropped_blocks])
        self.pool.share(dropped)
        if num_new_blocks > self.pool.num_allocatable:
            self.pool.free(dropped)
            return False
        self._next.lent += dropped
        return True

    def _is_loading(self, group: SequenceGroup) -> bool:
        """Whether blocks of a group's prompt are still read from disk; the first time they begin to be."""
        if self._tiers is None or group.holds_blocks or group.swapped is not None:
            return False
        if group.prefetch is None:
            group.prefetch = self._tiers.prefetch(self.tables.prefix_hashes(group.sequences[0]))
        return not group.prefetch.is_done

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Whether a running sequence will soon seal the block that this one would compute next."""
        index = len(sequence.block_table)
        if index >= len(sequence.block_hashes):
            return False
        running = (other for group in self.running for other in group.sequences)
        return any(
            index < len(other.block_hashes) and other.block_hashes[index] == sequence.block_hashes[index]
            for other in running
            if other.num_sealed_blocks <= index < other.num_exact_tokens // self.config.block_size
        )
