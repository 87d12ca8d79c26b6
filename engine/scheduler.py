"""Decides what each step computes: first come first served, under a token budget.

There is no prefill phase and no decode phase. A sequence has tokens that are not computed yet: many for a
new prompt, one for a sequence that decodes. Each step takes the oldest sequences first and computes as many
of those tokens as the budget allows; a long prompt is thus prefilled in chunks beside running decodes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from quire.engine.block_pool import BlockPool, NoFreeBlocksError
from quire.engine.sequence import HashBlock, Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step."""

    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or a full batch cannot decode in one step"
            )


class ScheduledSequence(NamedTuple):
    """A sequence and how many of its tokens this step computes."""

    sequence: Sequence
    num_scheduled_tokens: int


class Scheduler:
    """Moves sequences between waiting and running and gives them blocks."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, hash_block: HashBlock) -> None:
        self.config = config
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._hash_block = hash_block
        self._num_arrived = 0

    # --- the queues ---------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence, or one whose blocks were computed elsewhere and are in its table."""
        self.stamp_arrival(sequence)
        self.waiting.append(sequence)

    def stamp_arrival(self, sequence: Sequence) -> None:
        """Give a sequence its place in the order; the first stamp holds."""
        if not sequence.arrival:
            self._num_arrived += 1
            sequence.arrival = self._num_arrived

    def finish(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End a sequence in any state and free its blocks, unless they wait to be released."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.status = status
        if not sequence.stops_after_prefill or status == SequenceStatus.FINISHED_ABORTED:
            self.free_blocks(sequence)

    def free_blocks(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back; what is full stays cached."""
        self.pool.free(sequence.block_table)
        sequence.block_table.clear()

    # --- one step -----------------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the tokens of the next step and make sure their blocks exist."""
        budget = self.config.max_num_batched_tokens
        num_preemptions = self.num_preemptions
        scheduled: list[ScheduledSequence] = []
        # Oldest first: a victim is always newer, so it is not among those already scheduled.
        self.running.sort(key=lambda s: s.arrival)
        for sequence in self.running[:]:
            if sequence.status == SequenceStatus.PREEMPTED:
                continue
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            if num_tokens and self._grow(sequence, sequence.num_computed_tokens + num_tokens):
                scheduled.append(ScheduledSequence(sequence, num_tokens))
                budget -= num_tokens
        if self.num_preemptions != num_preemptions:
            return scheduled  # blocks are short: admitting now would only preempt again
        while self.waiting and budget and len(self.running) < self.config.max_num_seqs:
            if not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            scheduled.append(ScheduledSequence(sequence, num_tokens))
            budget -= num_tokens
        return scheduled

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let the table hold ``num_tokens``, preempting newer sequences for blocks if it must."""
        num_missing = self._blocks_for(num_tokens) - len(sequence.block_table)
        while num_missing > self.pool.num_allocatable:
            victim = self._newest_holder()
            if victim is None:
                return False  # blocks of a transfer in flight come back or turn into a running sequence
            self._preempt(victim)
            if victim is sequence:
                return False
        if num_missing > 0:
            sequence.block_table += self.pool.allocate(num_missing)
        return True

    def _newest_holder(self) -> Sequence | None:
        """Return the newest sequence whose blocks can be taken and recomputed."""
        holders = (s for s in (*self.running, *self.waiting) if s.block_table and not s.stops_after_prefill)
        return max(holders, key=lambda s: s.arrival, default=None)

    def _preempt(self, victim: Sequence) -> None:
        """Take a sequence's blocks; it is computed again, from what is still cached, when it is resumed."""
        self.num_preemptions += 1
        self.free_blocks(victim)
        victim.num_computed_tokens = victim.num_sealed_blocks = 0
        victim.status = SequenceStatus.PREEMPTED
        if victim in self.running:
            self.running.remove(victim)
            self.waiting.appendleft(victim)

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks: those of its cached prefix and new ones for the rest."""
        if sequence.block_table:
            # Its prompt was computed elsewhere; its first token may need one block more.
            if not self._grow(sequence, sequence.num_tokens):
                return False
        else:
            self.take_cached_prefix(sequence, max_tokens=sequence.num_tokens - 1)
            try:
                self.reserve(sequence)
            except NoFreeBlocksError:
                self.free_blocks(sequence)
                sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
                return False
        is_prefill = sequence.num_tokens - sequence.num_computed_tokens > 1
        sequence.status = SequenceStatus.PREFILLING if is_prefill else SequenceStatus.DECODING
        return True

    def take_cached_prefix(self, sequence: Sequence, max_tokens: int) -> None:
        """Start the table with the longest held prefix of at most ``max_tokens`` tokens.

        A sequence that is computed here leaves at least its last token, since its logits are needed.
        """
        sequence.extend_hashes(self.config.block_size, self._hash_block)
        block_ids = self.pool.look_up(sequence.block_hashes[: max_tokens // self.config.block_size])
        self.pool.share(block_ids)
        sequence.block_table = block_ids
        sequence.num_sealed_blocks = len(block_ids)
        sequence.num_computed_tokens = len(block_ids) * self.config.block_size
        if sequence.status != SequenceStatus.PREEMPTED:
            sequence.num_cached_tokens = sequence.num_computed_tokens

    def reserve(self, sequence: Sequence) -> None:
        """Extend the table to hold every token of the sequence.

        Raises:
            NoFreeBlocksError: there are too few blocks; the table is unchanged.
        """
        num_missing = self._blocks_for(sequence.num_tokens) - len(sequence.block_table)
        sequence.block_table += self.pool.allocate(max(0, num_missing))

    def seal(self, sequence: Sequence) -> None:
        """Make the blocks that became full reusable by anyone."""
        num_full = sequence.num_computed_tokens // self.config.block_size
        if num_full == sequence.num_sealed_blocks:
            return
        sequence.extend_hashes(self.config.block_size, self._hash_block)
        for index in range(sequence.num_sealed_blocks, num_full):
            block_hash = sequence.block_hashes[index]
            sequence.block_table[index] = self.pool.seal(sequence.block_table[index], block_hash)
        sequence.num_sealed_blocks = num_full

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)
