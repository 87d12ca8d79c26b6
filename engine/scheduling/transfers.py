"""Transfers: requests whose prompts another worker computes and pushes into blocks of this one.

::

    accept ──► reserve ──► grant_blocks ──► (the blocks are written) ──► admit
    take the   ask for     late allocation: all missing blocks,          decode
    cached     the rest    or none, in the order of arrival
    prefix

Blocks are allocated late, when the other worker begins to push. Until then a transfer holds only the part of
its prompt that was cached here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from quire.engine.errors import failing_request
from quire.engine.scheduling.fair_blocks import FairBlocks
from quire.engine.scheduling.group_queues import GroupQueues, OnOutcome
from quire.engine.scheduling.requests import Requests
from quire.engine.scheduling.sequence_group import NOT_ARRIVED, SequenceGroup
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.paged_eviction import PagedEviction
from quire.engine.sequences.sequence import Sequence, SequenceStatus, SequenceUpdate
from quire.engine.sequences.stop_rules import StopRules


@dataclass(eq=False)
class Transfers:
    """Gives blocks to requests whose prompts another worker computes, and admits them.

    Args:
        requests: the requests of the engine.
        queues: their queues; ``queues.transfers`` has the requests that lack blocks.
        fair_blocks: orders the groups of several clients.
        tables: the ledger of their blocks.
        eviction: chooses the blocks that a prompt with a KV budget frees when it has arrived.
        stop_rules: decide whether the first token ends a request.
    """

    requests: Requests
    queues: GroupQueues
    fair_blocks: FairBlocks
    tables: BlockTables
    eviction: PagedEviction
    stop_rules: StopRules

    @property
    def num_waiting(self) -> int:
        """Number of accepted requests whose blocks cannot all be allocated yet."""
        return len(self.queues.transfers)

    def accept(self, prompt: Sequence) -> int:
        """Accept a request whose prompt another worker computes; return the index of the first missing block.

        The blocks before that index are cached here. The request holds a reference to them until it ends, or
        until no later token attends to them. If the request has several sequences, they sample their first
        tokens here, so this worker computes the prompt's last token, and not the other worker.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        self.requests.register(prompt)
        prompt.status = SequenceStatus.TRANSFERRING
        num_tokens = prompt.num_transferred_tokens
        self.tables.bring_prefix(prompt)
        self.tables.take_cached_prefix(prompt, max_tokens=num_tokens)
        self.tables.drop_unseen(prompt, num_tokens)
        return len(prompt.block_table)

    def reserve(self, attempt_id: str, on_outcome: OnOutcome) -> None:
        """Ask for blocks for an accepted request's whole prompt; ``on_outcome`` later gets the outcome.

        ``on_outcome(True)`` means that the request got all of its blocks; it never gets only some of them.
        Accepted requests and requests that are computed here share one order of arrival.

        ``on_outcome(False)`` means that the request ended first. It may be ended to break a deadlock: waiting
        requests hold cached prefixes, and if nothing else could free blocks, the newest waiting request is
        ended, since another worker may have room for it.

        Raises:
            KeyError: the request has ended.
        """
        self.queues.add_transfer(self.requests.groups[attempt_id], on_outcome)

    def grant_blocks(self) -> None:
        """Give free blocks to waiting transfers; end the newest transfer if nothing else will free blocks.

        Call this after anything that may free blocks. ``Engine.step`` does so itself.
        """
        while self._grant_next() or (self.queues.is_idle and self.end_deadlocked()):
            pass

    def _grant_next(self) -> bool:
        """Give the next transfer the blocks for its whole prompt, if it may have them now.

        Returns:
            Whether it got them; False if no transfer waits, or if all wait for blocks that are granted.
        """
        in_order = self.fair_blocks.in_order(self.fair_blocks.next_transfers())
        group = next((each for each in in_order if self._may_be_next(each)), None)
        if group is None:
            return False
        num_missing = self.tables.num_missing(group.prompt)
        if num_missing > self.queues.num_spare_blocks:
            return False
        self.tables.reserve(group.prompt)
        self.queues.grant(group, num_missing)
        return True

    def _may_be_next(self, transfer: SequenceGroup) -> bool:
        """Return whether a transfer may get blocks before older transfers and waiting groups.

        Its sender may have to finish the older transfers first. They, and the older groups that they wait
        for, must therefore be able to end while all granted blocks still wait for their content.
        """
        if self._is_behind_waiting_group(transfer):
            return False
        waiting = set(takewhile(lambda group: group is not transfer, self.queues.transfers))
        if not waiting:
            return True
        groups = self.requests.groups.values()
        beside = (each for each in groups if each.prompt.status is SequenceStatus.TRANSFERRING)
        held = {each: len(each.prompt.held_blocks) for each in beside if each not in waiting}
        num_taken = sum(held.values()) + self.tables.num_missing(transfer.prompt)
        older = (each for each in groups if NOT_ARRIVED < each.arrival < transfer.arrival)
        num_needed = max(self._most_blocks(each) - held.get(each, 0) for each in older)
        return num_taken + num_needed <= self.tables.pool.num_blocks

    def _most_blocks(self, group: SequenceGroup) -> int:
        """Return how many blocks a group needs for its prompt and its longest answer."""
        prompt = group.prompt
        num_tokens = prompt.num_prompt_tokens + self.stop_rules.max_output_tokens(prompt)
        return self.tables.max_blocks(prompt, num_tokens)

    def _is_behind_waiting_group(self, transfer: SequenceGroup) -> bool:
        """Return whether an older group than a transfer waits for all its blocks.

        A group does not count if it waits for the disk, or if its client holds more blocks than the client of
        the transfer. If it belongs to another client or is larger, it also does not count while it waits for
        a sequence in a step.
        """

        def is_larger(group: SequenceGroup) -> bool:
            return group.lack is None and group.num_slots > transfer.num_slots

        older = takewhile(lambda group: group.arrival < transfer.arrival, self.queues.waiting)
        passed = self.queues.num_owed_blocks
        return any(
            not group.holds_blocks
            and not group.is_loading
            and not (group.client in passed and (group.client != transfer.client or is_larger(group)))
            and self.fair_blocks.rank(group) <= self.fair_blocks.rank(transfer)
            for group in older
        )

    def end_deadlocked(self) -> bool:
        """End the newest transfer if only waiting transfers hold blocks: no block would ever become free.

        Returns:
            Whether a transfer was ended, which frees its blocks.
        """
        transfers = self.queues.transfers
        held = {block_id for group in transfers for block_id in group.prompt.held_blocks}
        if not transfers or self.tables.pool.num_in_use > len(held):
            return False
        self.requests.discard_group(next(reversed(transfers)), SequenceStatus.FINISHED_ABORTED)
        return True

    def admit(self, attempt_id: str, first_token_id: int | None) -> SequenceUpdate:
        """Start decoding an accepted request whose prompt's blocks have all been written.

        Args:
            first_token_id: the token that the prefill worker sampled; None if all are sampled here.

        Raises:
            RequestFailedError: the request cannot continue.
        """
        group = self.requests.groups[attempt_id]
        prompt = group.prompt
        prompt.num_computed_tokens = prompt.num_transferred_tokens
        self.tables.seal(prompt)
        with failing_request(attempt_id):
            excess = self.eviction.choose(prompt)
        self.tables.drop(prompt, excess)
        prompt.status = SequenceStatus.WAITING
        if first_token_id is not None:
            prompt.token_ids.append(first_token_id)
            prompt.status = self.stop_rules.status_after_token(prompt)
        if prompt.status.is_finished:
            self.requests.finish_sequence(prompt, prompt.status)
        else:
            self.requests.queue_group(group)
        return SequenceUpdate(prompt, prompt.num_computed_tokens, [], prompt.status)
