"""Decides what each step computes: first come first served, under a token budget, and fairly between clients.

There is no prefill phase and no decode phase. A sequence has tokens that are not computed yet: many for a new
prompt, one for a sequence that decodes. Each step begins with the oldest groups, and computes as many of
these tokens as the budget allows. A long prompt is thus prefilled in chunks, in the same steps as decodes. If
a step has too little room for all groups, clients share it (``fair_turns.py``).

When blocks run out, the newest group gives up all of its blocks (``preemption.py``). It resumes when all of
them fit again.

Prompts that are computed here (``first_blocks.py``), preempted groups, and transfers, whose prompts another
worker computes (``transfers.py``), get blocks in one order of arrival (``group_queues.py``):

* While a group waits for blocks, no newer group gets its first block. Groups that hold all their blocks may
  run meanwhile. Each of them overtakes the blocked group at most once, because it keeps its blocks until it
  ends or is preempted, and because no newer transfer gets blocks while the older group waits.
* If several clients have groups, the order of arrival applies only within a client. The groups of a client
  that holds fewer blocks come first, and are preempted last (``fair_blocks.py``).
* A new group leaves 1 % of the blocks free while other groups run, so that these can grow.
* If an older group of another client waits for a sequence in a step, a newer group may get blocks first. For
  each such client, it leaves as many blocks free as the client's largest waiting group needs.

Every group runs eventually:

* A transfer gets all its blocks together or none. A transfer that has all of them waits only for its sender,
  and ends at its deadline at the latest. Two transfers therefore cannot wait for each other's blocks. There
  is one exception: a waiting transfer holds the part of its prompt that was cached here.
* If no group runs, waiting groups that hold blocks give them up, the newest group first, until a group can
  run. If only waiting transfers then hold blocks, the newest transfer is ended, and the router tries another
  worker. So as long as there are requests, a group runs or a transfer is in flight.
* Only groups that already hold blocks can overtake the oldest waiting group, and their number is bounded.
  Every answer has a bounded length, so these groups free their blocks, and the oldest waiting group is the
  first to get them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.engine.config import EngineConfig
from quire.engine.scheduling.fair_blocks import FairBlocks
from quire.engine.scheduling.fair_turns import FairTurns, Turns
from quire.engine.scheduling.first_blocks import FirstBlocks
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.preemption import Preemption
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import ScheduledSequence, Sequence, SequenceStatus

MAX_SCORED_TOKENS = 64
"""Most tokens that a step computes of a prompt whose logprobs are requested.

Each token needs logits for the whole vocabulary, so a chunk of the usual size would delay all other sequences
for a second or more.
"""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step; ``EngineConfig`` checks them.

    Attributes:
        block_size: tokens per block.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens that one step computes.
    """

    block_size: int = EngineConfig.block_size
    max_num_seqs: int = EngineConfig.max_num_seqs
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens

    @classmethod
    def of(cls, config: EngineConfig) -> SchedulerConfig:
        """Return the part of an engine's settings that the scheduler needs."""
        return cls(config.block_size, config.max_num_seqs, config.max_num_batched_tokens)


@dataclass(slots=True)
class _Budget:
    """What a step has left: tokens, draft tokens (which are some of the tokens), and sequences to admit.

    Attributes:
        turns: how many sequences of each group it computes; None means all.
        num_by_client: how many tokens it may still compute for each client; None means any number.
    """

    num_tokens: int
    num_drafts: int
    num_slots: int
    turns: Turns | None = None
    num_by_client: dict[str, int] | None = None

    def has_room(self, group: SequenceGroup) -> bool:
        """Return whether a group can start in this step."""
        if self.tokens_for(group) <= 0:
            return False
        return group.num_slots <= self.num_slots if self.turns is None else self.has_turn(group)

    def has_turn(self, group: SequenceGroup) -> bool:
        """Return whether a group has a turn in this step."""
        return self.turns is not None and self.turns.get(group, 0) > 0

    def tokens_for(self, group: SequenceGroup) -> int:
        """Return how many tokens the step may still compute for a group."""
        if self.num_by_client is None:
            return self.num_tokens
        return min(self.num_tokens, self.num_by_client.get(group.client, self.num_tokens))

    def spend(self, group: SequenceGroup, chosen: list[ScheduledSequence]) -> None:
        """Subtract the tokens of a group's scheduled sequences."""
        self.spend_tokens(group, sum(each.num_scheduled_tokens for each in chosen))
        self.num_drafts -= sum(len(each.sequence.draft_token_ids) for each in chosen)

    def spend_tokens(self, group: SequenceGroup, num_tokens: int) -> None:
        """Subtract tokens of a group."""
        self.num_tokens -= num_tokens
        if self.num_by_client is not None and group.client in self.num_by_client:
            self.num_by_client[group.client] -= num_tokens


@dataclass(eq=False)
class Scheduler:
    """Moves groups between waiting and running and gives them blocks.

    Args:
        config: the limits of a step.
        queues: the groups.
        tables: the ledger of the blocks that sequences hold.
        preemption: frees the blocks of groups, and copies them back.
        first_blocks: gives blocks to groups that start.
        fair_blocks: orders the groups of several clients.
    """

    config: SchedulerConfig
    queues: GroupQueues
    tables: BlockTables
    preemption: Preemption
    first_blocks: FirstBlocks
    fair_blocks: FairBlocks

    def __post_init__(self) -> None:
        config = self.config
        self._fair_turns = FairTurns(
            self.queues, self.fair_blocks, self.tables, config.max_num_seqs, config.max_num_batched_tokens
        )

    def schedule(self) -> Schedule:
        """Return the next step: make way, continue what runs, admit what waits; and allocate the blocks."""
        schedule, num_preempted = Schedule(), self.preemption.num_preempted
        budget = self._make_way(schedule)
        self._continue_running(schedule, budget)
        self._admit_groups(schedule, budget, has_preempted=self.preemption.num_preempted > num_preempted)
        self._continue_left_out(schedule, budget)
        self._continue_without_turns(schedule)
        self._fair_turns.record_step(schedule.sequences)
        return schedule

    def _make_way(self, schedule: Schedule) -> _Budget:
        """Preempt groups of clients that hold too many blocks; return what the step may compute."""
        num_preempted = self.preemption.num_preempted
        self.fair_blocks.count_held_blocks()
        budget = self._divided_budget()
        self._preempt_for_next(schedule, budget)
        has_preempted = self.preemption.num_preempted > num_preempted
        return self._divided_budget() if has_preempted else budget

    def _admit_groups(self, schedule: Schedule, budget: _Budget, *, has_preempted: bool) -> None:
        """Admit waiting groups; after a preemption none, since the running groups would soon preempt them."""
        if not has_preempted or not self.queues.running:
            self._admit_waiting(schedule, budget)
        if not self.queues.running:
            self._admit_first(schedule)

    def _continue_left_out(self, schedule: Schedule, budget: _Budget) -> None:
        """Compute prompts that were left out for a client whose waiting group could not start after all.

        Their blocks may be what that group waits for.
        """
        if budget.num_by_client is None or budget.num_tokens <= 0:
            return
        computed = {each.sequence for each in schedule.sequences}
        left_out = {g: g.num_slots for g in self.queues.running if computed.isdisjoint(g.sequences)}
        if left_out:
            budget.num_by_client = None
            budget.num_tokens = min(budget.num_tokens, self._fair_turns.num_short_tokens)
            turns = budget.turns
            budget.turns = {g: n if turns is None else turns.get(g, 0) for g, n in left_out.items()}
            self._continue_running(schedule, budget)

    def _continue_without_turns(self, schedule: Schedule) -> None:
        """Divide a step again if it computes nothing although groups run: the engine would stop and wait.

        This happens if the groups with turns were preempted or could not start.
        """
        while self.queues.running and not schedule.sequences:
            num_preempted = self.preemption.num_preempted
            self._continue_running(schedule, self._divided_budget(with_waiting=False))
            if not self.queues.running:
                self._admit_first(schedule)
            elif self.preemption.num_preempted == num_preempted:
                return

    def _budget(self) -> _Budget:
        num_tokens = self.config.max_num_batched_tokens
        # Draft tokens leave room in the budget for one token of every running sequence.
        num_drafts = max(0, num_tokens - sum([len(group.sequences) for group in self.queues.running]))
        return _Budget(num_tokens, num_drafts, self.config.max_num_seqs)

    def _divided_budget(self, *, with_waiting: bool = True) -> _Budget:
        budget = self._budget()
        budget.turns = self._fair_turns.divide_sequences(with_waiting=with_waiting)
        budget.num_by_client = self._fair_turns.divide_tokens()
        return budget

    def _admit_first(self, schedule: Schedule) -> None:
        """Admit groups while none runs, since waiting groups that hold blocks would never release them."""
        budget = self._budget()
        self._admit_waiting(schedule, budget)
        if not self.queues.running:
            self._free_waiting(schedule, budget)

    def _free_waiting(self, schedule: Schedule, budget: _Budget) -> None:
        """Take the blocks of waiting groups, the newest first, until a group runs."""
        holding = reversed(self.queues.waiting_with_blocks())
        for group in [group for group in holding if group.is_preemptible]:
            self.preemption.preempt(group, schedule)
            self._admit_waiting(schedule, budget)
            if self.queues.running:
                return

    def _preempt_for_next(self, schedule: Schedule, budget: _Budget) -> None:
        """Preempt groups of clients that hold many blocks for the next group of one that holds few."""
        group = self.fair_blocks.next_without_blocks(budget.has_room)
        while group is not None and (victim := self.fair_blocks.victim_for(group)) is not None:
            self.preemption.preempt(victim, schedule)
            self.fair_blocks.count_held_blocks()

    # --- running groups -----------------------------------------------------------------------------------

    def _continue_running(self, schedule: Schedule, budget: _Budget) -> None:
        """Schedule the running groups in their order; preempt the last if there are too few blocks."""
        num_preempted = self.preemption.num_preempted
        for group in self.fair_blocks.in_order(self.queues.running):
            if budget.turns is not None and not budget.turns.get(group):
                continue
            if budget.tokens_for(group) > 0 and self._has_next_token(group.prompt):
                schedule.sequences.append(group.next_token)
                budget.spend_tokens(group, 1)
                budget.num_slots -= 1
                continue
            # A victim of a preemption was not scheduled yet.
            if self.preemption.num_preempted != num_preempted and group not in self.queues.running:
                continue
            budget.num_slots -= group.num_slots
            chosen = self._choose_tokens(group, budget)
            if group.num_draft_tokens and not self._has_room(chosen):
                group.drop_drafts()  # no group is preempted to make room for draft tokens
                chosen = self._choose_tokens(group, budget)
            if chosen and self._make_room(group, chosen, schedule):
                self._append(chosen, schedule)
                schedule.sequences += chosen
                budget.spend(group, chosen)

    def _has_next_token(self, sequence: Sequence) -> bool:
        """Return whether a sequence is plain and lacks one token, for which it has room or gets a new block.

        There is nothing else to decide for such a sequence, since only samples and beams of one request share
        a block that is not full. Most sequences of most steps are like this.
        """
        num_computed = sequence.num_computed_tokens
        if not sequence.is_plain or len(sequence.token_ids) > num_computed + 1 or sequence.draft_token_ids:
            return False
        num_free = len(sequence.block_table) * self.config.block_size - num_computed
        return num_free > 0 or (num_free == 0 and self.tables.add_block(sequence))

    def _choose_tokens(self, group: SequenceGroup, budget: _Budget) -> list[ScheduledSequence]:
        """Return which sequences of a group to compute in this step, and how many tokens of each.

        ::

            [ computed tokens | tokens to compute | draft tokens ]      64 tokens are left in the step
            [        0        |        100        |      0       ]      64: the others in later steps
            [       90        |         1         |      3       ]      1 + 3 draft tokens to verify

        Beams advance together: the step computes the last tokens of all of them, or of none.
        """
        started = self._started_sequences(group, budget.turns.get(group) if budget.turns else None)
        num_tokens_left, num_drafts_left, num_kept_back = budget.tokens_for(group), budget.num_drafts, 0
        if group.beam is not None and group.is_forked:
            if any(s.num_tokens - s.num_computed_tokens > 1 for s in group.sequences):
                num_kept_back = 1
            elif len(group.sequences) > num_tokens_left:
                return []
        chosen = []
        for sequence in started:
            num_tokens = min(sequence.max_step_tokens(self.config.block_size), num_tokens_left)
            if sequence.positions_to_score(num_tokens):
                num_tokens = min(num_tokens, MAX_SCORED_TOKENS)
            if num_kept_back:
                num_tokens = min(num_tokens, sequence.num_tokens - sequence.num_computed_tokens - 1)
            if sequence.draft_token_ids:
                del sequence.draft_token_ids[max(0, min(num_drafts_left, num_tokens_left - num_tokens)) :]
                num_drafts_left -= len(sequence.draft_token_ids)
                num_tokens += len(sequence.draft_token_ids)
            if num_tokens > 0:
                chosen.append(ScheduledSequence(sequence, num_tokens))
                num_tokens_left -= num_tokens
        return chosen

    def _started_sequences(self, group: SequenceGroup, most: int | None) -> list[Sequence]:
        """Return the sequences of a group to compute; only the first ones if there are too many.

        After a preemption all sequences may have to be recomputed. The others then wait until the first one
        has sealed the blocks of the prompt. Otherwise each would compute the prompt into separate blocks.
        """
        first, *others = group.sequences[:most]
        started = [first]
        for sequence in others:
            if not sequence.block_table:
                if first.num_sealed_blocks < first.num_prompt_tokens // self.config.block_size:
                    continue
                self.tables.take_cached_prefix(sequence, max_tokens=sequence.num_tokens - 1)
            started.append(sequence)
        return started

    def _has_room(self, chosen: list[ScheduledSequence]) -> bool:
        """Return whether there are blocks for the chosen tokens."""
        return self.tables.num_appended_blocks(chosen) <= self.tables.pool.num_allocatable

    def _make_room(self, group: SequenceGroup, chosen: list[ScheduledSequence], schedule: Schedule) -> bool:
        """Preempt the last groups until there are blocks for the chosen tokens; return whether there are."""
        while not self._has_room(chosen):
            victim = self.fair_blocks.last_victim()
            # A running group has no blocks if those of its sequences that had some have ended. A group that
            # comes before it gives up none for it. A transfer in flight later frees its blocks, or runs.
            if victim is None or self.fair_blocks.position(victim) < self.fair_blocks.position(group):
                return False
            # A group that was left out at first is asked again after later ones, which the step computes.
            if any(each.sequence in victim.sequences for each in schedule.sequences):
                return False
            self.preemption.preempt(victim, schedule)
            if victim is group:
                return False
        return True

    def _append(self, chosen: list[ScheduledSequence], schedule: Schedule) -> None:
        """Extend the tables by the chosen tokens; plan copies of shared blocks that will be written."""
        for sequence, num_tokens in chosen:
            if (copy := self.tables.append(sequence, num_tokens)) is not None:
                schedule.copies += self.tables.pool.copies([copy])

    # --- waiting groups -----------------------------------------------------------------------------------

    def _admit_waiting(self, schedule: Schedule, budget: _Budget) -> None:
        """Admit groups in their order, but no group that lacks blocks before an older transfer.

        A group with blocks may overtake groups without blocks. Any group may overtake a group of another
        client if the step has no sequence or token left for that client. A group that has a turn may also
        overtake larger groups of its own client.
        """
        queues = self.queues
        owed: dict[str, int] = {}
        queues.num_owed_blocks = owed
        if not queues.waiting:
            return
        oldest_transfer = next((group.arrival for group in self.fair_blocks.next_transfers()), None)
        starting = set(budget.turns or ()).difference(queues.running)
        smallest: dict[str, int] = {}  # sequences of a group that was passed, by client
        for group in self.fair_blocks.in_order(queues.waiting):
            if oldest_transfer is not None and group.arrival > oldest_transfer:
                continue
            if group.client not in owed and self.first_blocks.is_loading(group):
                continue
            starting.discard(group)
            is_behind = group.num_slots >= smallest.get(group.client, math.inf) or not budget.has_turn(group)
            if (group.client in owed and is_behind) or not budget.has_room(group):
                self._pass(group, owed)
                smallest[group.client] = min(group.num_slots, smallest.get(group.client, group.num_slots))
                if (len(owed) == len(queues.clients) and not starting) or budget.num_tokens <= 0:
                    return
            elif not self._start(group, schedule, budget):
                break
        for group in queues.waiting_with_blocks():
            if group.client not in owed or budget.has_turn(group):
                if not budget.has_room(group):
                    self._pass(group, owed)
                else:
                    self._start(group, schedule, budget)

    def _pass(self, group: SequenceGroup, owed: dict[str, int]) -> None:
        """Let groups of other clients overtake a group, but leave it the blocks that it may need."""
        num_blocks = 0
        if not group.holds_blocks:
            swapped = group.swapped
            num_blocks = len(swapped.host_ids) if swapped else self.tables.blocks_for(group.prompt.num_tokens)
        owed[group.client] = max(owed.get(group.client, 0), num_blocks)

    def _start(self, group: SequenceGroup, schedule: Schedule, budget: _Budget) -> bool:
        """Admit a waiting group if possible; return whether it was admitted."""
        chosen = self._admit(group, schedule, budget)
        if chosen is None:
            self.queues.note_blocks(group)
            return False
        self.queues.start_group(group)
        schedule.sequences += chosen
        schedule.admitted.append(group.prompt)
        budget.num_slots -= group.num_slots
        budget.spend(group, chosen)
        return True

    def _admit(
        self, group: SequenceGroup, schedule: Schedule, budget: _Budget
    ) -> list[ScheduledSequence] | None:
        """Give a waiting group its blocks: from swap space, or its cached prefix and new blocks.

        Returns:
            The sequences and tokens to compute in this step; None if the group cannot be admitted.
        """

        def num_next_blocks(group: SequenceGroup) -> int:
            return self.tables.num_appended_blocks(self._choose_tokens(group, budget))

        if group.swapped is not None and not self.preemption.swapping.swap_in(
            group, schedule, num_next_blocks
        ):
            return None
        if not group.holds_blocks and not self.first_blocks.allocate_for(group, schedule):
            return None
        chosen = self._choose_tokens(group, budget)
        if not self._has_room(chosen):
            return None
        self._append(chosen, schedule)
        is_prefill = group.num_uncomputed_tokens > len(group.sequences)
        group.set_status(SequenceStatus.PREFILLING if is_prefill else SequenceStatus.DECODING)
        return chosen
