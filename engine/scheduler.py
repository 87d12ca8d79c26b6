"""Decides what each step computes: first come first served, under a token budget.

There is no prefill phase and no decode phase. A sequence has tokens that are not computed yet: many for a
new prompt, one for a sequence that decodes. Each step takes the oldest groups first and computes as many of
those tokens as the budget allows. A long prompt is thus prefilled in chunks, in the same steps as decodes.

When blocks run out, the newest group gives up all of its blocks. It resumes when there is room for all of
them. They are then copied back from host memory or recomputed, whichever is cheaper (PagedAttention,
section 4.5).

Prompts that are computed here, preempted groups, and transfers (whose prompts another worker computes) get
blocks in one order of arrival:

* No group without blocks gets its first block before an older group that waits for blocks. Groups that hold
  all their blocks may run meanwhile. Each of them passes a blocked group at most once, because it keeps its
  blocks until it ends or is preempted, and because no newer transfer gets blocks while the older group waits.
* A new group leaves 1 % of the blocks free while other groups run, so that these can grow.

Every group runs eventually:

* A transfer gets all its blocks at once or none. A transfer that has all of them waits only for its sender,
  and ends at its deadline at the latest. So no two transfers wait for each other's blocks, with one
  exception: a waiting transfer holds the part of its prompt that was cached here.
* If no group runs, the waiting groups that hold blocks give them up, the newest first, until one can run.
  If only waiting transfers then hold blocks, the newest is ended, and the router tries another worker. So as
  long as anything is left to do, a group runs or a transfer is in flight.
* A bounded number of groups can overtake the oldest waiting group: those that already hold blocks. Every
  answer has a bounded length, so they free their blocks, and the oldest waiting group gets these first.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from quire.engine.block_pool import BlockPool
from quire.engine.block_tables import BlockTables
from quire.engine.block_tokens import PartialHit
from quire.engine.cache_tiers import CacheTiers
from quire.engine.sequence import NO_BLOCK, Sequence, SequenceStatus
from quire.engine.sequence_group import Lack, SequenceGroup, SwappedTables
from quire.engine.swap_space import SwapSpace

PREEMPTION_MODES = ("auto", "swap", "recompute")

OnOutcome = Callable[[bool], None]
"""Called with True when a transfer got its blocks, with False when it ended without them."""

WATERMARK = 0.01
"""Share of the pool that new groups leave free for running groups, as in vLLM."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and how preempted groups get their blocks back.

    Attributes:
        block_size: tokens per block.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens that one step computes.
        preemption: "swap" copies a preempted group's blocks to host memory if there is room, "recompute"
            computes them again, "auto" chooses the faster way.
    """

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
    """A sequence and how many of its tokens this step computes, including its draft tokens."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def num_sampled_rows(self) -> int:
        """Rows of logits to sample from: one after its last token and one after each draft token."""
        return 1 + len(self.sequence.draft_token_ids)


@dataclass(slots=True)
class Schedule:
    """What one step does: it moves blocks, in the order of the attributes, and then computes tokens.

    Attributes:
        swap_out: (block, host block) to copy to host memory.
        swap_in: (host block, block) to copy back.
        copies: (block, block) to copy before the second is written.
        pinned: cached blocks that are pinned until all copies have been made.
        promotions: (host block, block) to copy from the prefix cache in host memory.
        promoted: (sequence, number of blocks) for each table that gets promoted blocks: that many of its
            leading blocks are full after the copies.
        sequences: the sequences to compute.
        admitted: the groups among them that were waiting before, whether new or preempted.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    promotions: list[tuple[int, int]] = field(default_factory=list)
    promoted: list[tuple[Sequence, int]] = field(default_factory=list)
    sequences: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[SequenceGroup] = field(default_factory=list)

    @property
    def moves_blocks(self) -> bool:
        """Whether the step copies any block."""
        return bool(self.swap_out or self.swap_in or self.copies or self.promotions)


class PreemptionCounts(NamedTuple):
    """How often groups were preempted, by the way in which they get their blocks back."""

    swapped: int
    recomputed: int


class Scheduler:
    """Moves groups between waiting and running and gives them blocks.

    Args:
        config: the limits of a step.
        pool: the blocks.
        tables: the ledger of the blocks that sequences hold.
        swap_space: host blocks for preempted groups; None means that there are none.
        prefers_swap: gets numbers of tokens and blocks, and returns whether it is faster to copy the blocks
            back from host memory than to recompute the tokens.
        tiers: the prefix cache below the pool; None means that there is none.
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
        self.transfers: dict[SequenceGroup, OnOutcome] = {}
        """Groups whose prompts other workers compute and that wait for blocks, in the order of arrival."""
        self.preemptions = PreemptionCounts(0, 0)
        self._swap_space = swap_space or SwapSpace(0)
        self._prefers_swap = prefers_swap
        self._tiers = tiers
        self._num_watermark_blocks = math.ceil(WATERMARK * pool.num_blocks)
        self._num_arrived = 0
        self._next = Schedule()
        self._draft_budget = 0

    @property
    def num_preemptions(self) -> int:
        """How often groups were preempted, whether swapped out or recomputed."""
        return sum(self.preemptions)

    # --- the queues ---------------------------------------------------------------------------------------

    def add(self, group: SequenceGroup) -> None:
        """Queue a new group, or one whose blocks were computed elsewhere and are in its table."""
        self._stamp_arrival(group)
        self._wait(group)

    def _wait(self, group: SequenceGroup) -> None:
        """Queue a group in the order of arrival; a transfer may be complete after one that began later."""
        insort(self.waiting, group, key=lambda g: g.arrival)

    def add_transfer(self, group: SequenceGroup, on_outcome: OnOutcome) -> None:
        """Queue a group for the blocks that it lacks; ``on_outcome`` is told whether it gets them."""
        self._stamp_arrival(group)
        self.transfers[group] = on_outcome

    def _stamp_arrival(self, group: SequenceGroup) -> None:
        """Give a group its position in the order of arrival, unless it has one."""
        if not group.arrival:
            self._num_arrived += 1
            group.arrival = self._num_arrived

    def finish(self, group: SequenceGroup, sequence: Sequence, status: SequenceStatus) -> None:
        """End a sequence in any state; free its blocks, unless another worker is to fetch them.

        The blocks of a finished prefill stay until ``discard`` releases them.
        """
        sequence.status = status
        if sequence.stops_after_prefill and status != SequenceStatus.FINISHED_ABORTED:
            self._leave_queues(group)
            return
        group.free(sequence, self.pool)
        group.sequences.remove(sequence)
        if not group.sequences:
            self._leave_queues(group)

    def discard(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """End all sequences of a group and free their blocks, in the pool and in host memory."""
        self._leave_queues(group)
        if group.swapped is not None:
            self._swap_space.free(group.swapped.host_ids)
            group.swapped = None
        for sequence in group.sequences:
            sequence.status = status
            group.free(sequence, self.pool)
        group.sequences.clear()
        if (on_outcome := self.transfers.pop(group, None)) is not None:
            on_outcome(False)

    def _leave_queues(self, group: SequenceGroup) -> None:
        if group in self.running:
            self.running.remove(group)
        elif group in self.waiting:
            self.waiting.remove(group)

    # --- one step -----------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Return the next step: choose its tokens and allocate their blocks."""
        self._next = step = Schedule()
        budget = self.config.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        # Draft tokens leave room in the budget for one token of every running sequence.
        self._draft_budget = max(0, budget - sum(len(group.sequences) for group in self.running))
        # The oldest group comes first. A victim is always newer, so it has not been scheduled yet.
        for group in self.running[:]:
            if group not in self.running:
                continue
            wanted = self._wanted(group, budget)
            num_drafted = group.num_drafted_tokens
            if num_drafted and self._num_missing(wanted) > self.pool.num_allocatable:
                group.drop_drafts()  # no group is preempted to make room for draft tokens
                wanted, num_drafted = self._wanted(group, budget), 0
            if wanted and self._make_room(group, wanted):
                self._append(wanted)
                step.sequences += wanted
                self._draft_budget -= num_drafted
                budget -= sum(each.num_scheduled_tokens for each in wanted)
        # After a preemption nothing is admitted, since the running groups would soon preempt it again.
        if self.num_preemptions == num_preemptions or not self.running:
            self._admit_waiting(budget)
            # If nothing runs, waiting groups that hold blocks would never release them.
            for group in [group for group in reversed(self.waiting) if group.is_preemptible]:
                if self.running:
                    break
                self._preempt(group)
                self._admit_waiting(budget)
        return step

    def _admit_waiting(self, budget: int) -> None:
        """Admit groups in the order of arrival; a group with blocks may pass a group without."""
        num_slots = sum(group.num_slots for group in self.running)
        oldest_transfer = next((group.arrival for group in self.transfers), math.inf)
        is_blocked = False
        for group in list(self.waiting):
            is_blocked = is_blocked or group.arrival > oldest_transfer
            if not group.holds_blocks and (is_blocked or self._is_loading(group)):
                continue
            if not budget or num_slots + group.num_slots > self.config.max_num_seqs:
                return
            wanted = self._admit(group, budget)
            if wanted is None:
                is_blocked = True
                continue
            num_slots += group.num_slots
            self.waiting.remove(group)
            insort(self.running, group, key=lambda g: g.arrival)
            self._next.sequences += wanted
            self._next.admitted.append(group)
            budget -= sum(each.num_scheduled_tokens for each in wanted)

    def _wanted(self, group: SequenceGroup, budget: int) -> list[ScheduledSequence]:
        """Return which sequences of a group to compute in this step, and how many tokens of each.

        Beams advance together: the step computes the last tokens of all of them, or of none.
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

        After a preemption all sequences may have to be recomputed. The others then wait until the first one
        has sealed the blocks of the prompt. Otherwise each would compute the prompt into blocks of its own.
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
        """Preempt newer groups until there are blocks for the requested tokens; return whether there are."""
        while self._num_missing(wanted) > self.pool.num_allocatable:
            victim = self._newest_holder()
            if victim is None:
                return False  # a transfer in flight later frees its blocks or becomes a running group
            self._preempt(victim)
            if victim is group:
                return False
        return True

    def _append(self, wanted: list[ScheduledSequence]) -> None:
        """Extend the tables by the requested tokens; plan copies of shared blocks that will be written."""
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
        """Return how many new blocks the requested tokens take, including copies of shared blocks."""
        num_new = 0
        shared_blocks = []
        for sequence, num_tokens in wanted:
            num_needed = self.tables.blocks_for(sequence.num_computed_tokens + num_tokens)
            num_new += max(0, num_needed - len(sequence.block_table))
            if (shared := self._shared_block(sequence)) is not None:
                shared_blocks.append(shared)
        if not shared_blocks:
            return num_new
        # The last sequence that refers to a shared block writes it without a copy.
        writers = Counter(shared_blocks)
        return num_new + sum(min(count, self.pool.ref_cnt(block) - 1) for block, count in writers.items())

    def _shared_block(self, sequence: Sequence) -> int | None:
        """Return the block that the sequence writes next if others read it too, else None."""
        index = sequence.num_computed_tokens // self.config.block_size
        if index >= len(sequence.block_table):
            return None
        block_id = sequence.block_table[index]
        return block_id if self.pool.ref_cnt(block_id) > 1 else None

    # --- preemption ---------------------------------------------------------------------------------------

    def _newest_holder(self) -> SequenceGroup | None:
        """Return the newest group that can be preempted; None if there is none."""
        holders = (group for group in (*self.running, *self.waiting) if group.is_preemptible)
        return max(holders, key=lambda group: group.arrival, default=None)

    def _preempt(self, victim: SequenceGroup) -> None:
        """Take all blocks of a group, and plan to swap them out or to recompute them."""
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
        """Plan to copy a group's blocks to host memory, each once; return whether they are swapped out.

        They are not if host memory lacks room, or if recomputing is configured or cheaper.
        """
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
        index_of = {NO_BLOCK: NO_BLOCK, **{block_id: index for index, block_id in enumerate(block_ids)}}
        tables = [[index_of[block_id] for block_id in table] for table in computed]
        victim.swapped = SwappedTables(host_ids, tables)
        return True

    def _swap_in(self, group: SequenceGroup, swapped: SwappedTables, budget: int) -> bool:
        """Plan to copy a group's blocks back; return False if they and its next tokens do not all fit."""
        if len(swapped.host_ids) > self._num_spare_blocks:
            return False
        block_ids = self.pool.allocate(len(swapped.host_ids))
        for sequence, table in zip(group.sequences, swapped.tables, strict=True):
            sequence.block_table = [block_ids[index] if index != NO_BLOCK else NO_BLOCK for index in table]
            self.pool.share(sequence.held_blocks)
        self.pool.free(block_ids)
        if self._num_missing(self._wanted(group, budget)) > self._num_spare_blocks:
            for sequence in group.sequences:
                group.free(sequence, self.pool)
            return False
        self._next.swap_in += zip(swapped.host_ids, block_ids, strict=True)
        self._swap_space.free_after_step(swapped.host_ids)
        group.swapped = None
        return True

    # --- admission ----------------------------------------------------------------------------------------

    @property
    def _num_spare_blocks(self) -> int:
        """Blocks that a group without blocks may take; while groups run, some are kept for their growth."""
        return self.pool.num_allocatable - (self._num_watermark_blocks if self.running else 0)

    def grant_oldest_transfer(self) -> bool:
        """Give the oldest waiting transfer the blocks for its whole prompt, if it is its turn.

        Returns:
            Whether it got them; False if no transfer waits.
        """
        group = next(iter(self.transfers), None)
        if group is None or self._lacks_older(group):
            return False
        if self.tables.num_missing(group.prompt) > self._num_spare_blocks:
            return False
        self.tables.reserve(group.prompt)
        self.transfers.pop(group)(True)
        return True

    def _lacks_older(self, transfer: SequenceGroup) -> bool:
        """Return whether an older group than a transfer waits for all its blocks, and not for a disk."""
        older = takewhile(lambda group: group.arrival < transfer.arrival, self.waiting)
        return any(not group.holds_blocks and not group.is_loading for group in older)

    def newest_deadlocked_transfer(self) -> SequenceGroup | None:
        """Return the newest transfer if only waiting transfers hold blocks, so that none would be freed."""
        held = {block_id for group in self.transfers for block_id in group.prompt.held_blocks}
        return None if self.pool.counts.used > len(held) else next(reversed(self.transfers), None)

    def _admit(self, group: SequenceGroup, budget: int) -> list[ScheduledSequence] | None:
        """Give a waiting group its blocks: from swap space or its cached prefix, and new ones.

        Returns:
            The sequences and tokens to compute in this step; None if the group cannot be admitted.
        """
        if group.swapped is not None and not self._swap_in(group, group.swapped, budget):
            return None
        if not group.holds_blocks and (self._still_lacks_blocks(group) or not self._begin(group)):
            return None
        wanted = self._wanted(group, budget)
        if self._num_missing(wanted) > self.pool.num_allocatable:
            return None
        self._append(wanted)
        is_prefill = group.num_uncomputed_tokens > len(group.sequences)
        group.set_status(SequenceStatus.PREFILLING if is_prefill else SequenceStatus.DECODING)
        return wanted

    def _still_lacks_blocks(self, group: SequenceGroup) -> bool:
        """Return whether a group still lacks blocks; matching its whole prompt again would be slow."""
        lack = group.lack
        if lack is None or not self.running:
            return False
        return lack.num_blocks > self._num_spare_blocks and not self.pool.look_up(lack.next_hash)

    def _begin(self, group: SequenceGroup) -> bool:
        """Give a group's first sequence blocks for all its tokens, or as many as it can ever hold at once.

        Returns:
            Whether it got them. It gets none if there are too few, or if a running sequence is about to seal
            the block that this one would compute next.
        """
        sequence, num_allocatable = group.sequences[0], self.pool.num_allocatable
        self.tables.take_cached_prefix(sequence, max_tokens=sequence.num_tokens - 1)
        num_wanted = self.tables.max_held_blocks(sequence, 1, sequence.num_tokens)
        last = min(self.tables.blocks_for(sequence.num_tokens), sequence.num_dropped_blocks + num_wanted)
        num_missing = last - len(sequence.block_table)
        # If a sequence frees blocks before it has all of them, later steps must allocate the rest and may
        # find no room. Such a sequence takes nothing from host memory.
        is_whole = last == self.tables.blocks_for(sequence.num_tokens)
        num_revived = num_allocatable - self.pool.num_allocatable
        is_lacking = num_missing > self._num_spare_blocks
        group.lack = Lack(num_missing + num_revived, self._next_hash(sequence)) if is_lacking else None
        if is_lacking or self._is_being_computed(sequence):
            self.pool.free(sequence.held_blocks)
            sequence.block_table.clear()
            sequence.num_computed_tokens = sequence.num_sealed_blocks = sequence.num_dropped_blocks = 0
            return False
        # This comes before the allocation, whose evictions may push these blocks out of host memory.
        host_ids = self._take_from_host(sequence, num_missing) if is_whole else []
        hit = None if host_ids else self._hold_partial_hit(sequence, num_missing)
        new_blocks = self.pool.allocate(num_missing)
        if host_ids:
            self._next.promotions += zip(host_ids, new_blocks, strict=False)
            self._next.promoted.append((sequence, len(sequence.block_table) + len(host_ids)))
        sequence.block_table += new_blocks
        if hit is not None:
            self._next.pinned.append(hit.block_id)
            self._next.copies.append((hit.block_id, sequence.block_table[sequence.num_sealed_blocks]))
            self.tables.count_cached(sequence, hit.num_tokens)
        return True

    def _next_hash(self, sequence: Sequence) -> list[bytes]:
        """Return the hash of the first block after the cached prefix, as a list; empty if it is unusable."""
        max_tokens = min(sequence.num_tokens - 1, sequence.max_cached_tokens)
        index = len(sequence.block_table)
        return sequence.block_hashes[index : min(index + 1, max_tokens // self.config.block_size)]

    def _hold_partial_hit(self, sequence: Sequence, num_new_blocks: int) -> PartialHit | None:
        """Reference a cached block whose leading tokens are the sequence's next tokens; return it, or None.

        The sequence gets a copy of the block. It seals the copy once all tokens in it are computed.
        """
        hit = self.tables.partial_hit(sequence)
        if hit is None:
            return None
        self.pool.share([hit.block_id])
        if num_new_blocks > self.pool.num_allocatable:
            self.pool.free([hit.block_id])
            return None
        return hit

    def on_blocks_moved(self, schedule: Schedule) -> None:
        """Record that a step's blocks have been moved: seal promoted blocks and free what was held."""
        self._swap_space.end_step()
        for sequence, num_full in schedule.promoted:
            self.tables.seal_blocks(sequence, num_full)
        self.pool.free(schedule.pinned)

    def _take_from_host(self, sequence: Sequence, max_blocks: int) -> list[int]:
        """Return the cached host blocks that follow a sequence's table, and count their tokens as computed.

        The pool's blocks are sealed after the copy. Until then they have no content that could be evicted.
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
        host_ids = self._tiers.begin_promotion(wanted[:num_held])
        num_tokens = len(host_ids) * self.config.block_size
        self.tables.count_cached(sequence, num_tokens)
        if sequence.status != SequenceStatus.PREEMPTED:
            sequence.num_promoted_tokens = num_tokens
        return host_ids

    def _hold_dropped(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Reference the cached blocks that a window has dropped until the step's blocks have been moved.

        They are the parents of the blocks that come from host memory. Without a reference, the allocation of
        new blocks could evict them, and their children could then not be sealed.

        Returns:
            Whether the new blocks still fit; if not, no reference is kept.
        """
        dropped = self.pool.look_up(sequence.block_hashes[: sequence.num_dropped_blocks])
        self.pool.share(dropped)
        if num_new_blocks > self.pool.num_allocatable:
            self.pool.free(dropped)
            return False
        self._next.pinned += dropped
        return True

    def _is_loading(self, group: SequenceGroup) -> bool:
        """Return whether blocks of a group's prompt are still read from disk; the first call starts it."""
        if self._tiers is None or group.holds_blocks or group.swapped is not None:
            return False
        if group.prefetch is None:
            group.prefetch = self._tiers.prefetch(self.tables.prefix_hashes(group.sequences[0]))
        return group.is_loading

    def _is_being_computed(self, sequence: Sequence) -> bool:
        """Return whether a running sequence will soon seal the block that this one would compute next."""
        index = len(sequence.block_table)
        if index >= len(sequence.block_hashes):
            return False
        running = (other for group in self.running for other in group.sequences)
        return any(
            index < len(other.block_hashes) and other.block_hashes[index] == sequence.block_hashes[index]
            for other in running
            if other.num_sealed_blocks <= index < other.num_exact_tokens // self.config.block_size
        )
