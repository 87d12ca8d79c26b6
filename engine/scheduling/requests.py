"""The requests in an engine, from their arrival until their last blocks are free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.request_checks import RequestChecks
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.beam_search import BeamSearch
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.sequence import Sequence, SequenceStatus
from quire.engine.sequences.stop_rules import StopRules


@dataclass(eq=False)
class Requests:
    """Registers requests, and ends them in any state.

    Args:
        checks: refuses requests that can never run.
        stop_rules: decide when a beam of a beam search ends.
        queues: the queues that requests leave when they end.
        tables: the ledger of their blocks.
        swap_space: the host blocks of preempted requests.
        clock: returns seconds, for the times when requests are queued and end.

    Attributes:
        groups: the requests by id.
    """

    checks: RequestChecks
    stop_rules: StopRules
    queues: GroupQueues
    tables: BlockTables
    swap_space: SwapSpace
    clock: Callable[[], float]
    groups: dict[str, SequenceGroup] = field(default_factory=dict, init=False)

    def register(self, prompt: Sequence) -> SequenceGroup:
        """Register a new request; return its group, which is not in a queue yet.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        if prompt.attempt_id in self.groups:
            raise ValueError(f"request {prompt.attempt_id} is already here")
        self.checks.check(prompt)
        prompt.is_plain = _is_plain(prompt)
        group = SequenceGroup(prompt, [prompt])
        if prompt.params.beam is not None:
            max_tokens = self.stop_rules.max_output_tokens(prompt)
            stop_token_ids = self.stop_rules.stop_token_ids(prompt.params)
            group.beam = BeamSearch(prompt.params.beam, max_tokens, stop_token_ids)
        self.groups[prompt.attempt_id] = group
        return group

    def queue_group(self, group: SequenceGroup) -> None:
        """Let a group wait for the scheduler."""
        self.queues.add_waiting(group)
        group.prompt.queued_at = self.clock()

    def finish_sequence(self, sequence: Sequence, status: SequenceStatus) -> None:
        """End a sequence; free its blocks, unless another worker is to fetch them.

        The blocks of a finished prefill stay until ``discard_group`` releases them.
        """
        group = self.groups[sequence.attempt_id]
        sequence.finished_at = self.clock()
        sequence.status = status
        if sequence.stops_after_prefill:
            self.queues.remove_group(group)
            return
        self.tables.free(sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            self.queues.remove_group(group)
            del self.groups[group.attempt_id]

    def discard_group(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """End all sequences of a group and free their blocks, in the pool and in host memory."""
        del self.groups[group.attempt_id]
        self.queues.remove_group(group)
        if group.swapped is not None:
            self.swap_space.free(group.swapped.host_ids)
            group.swapped = None
        for sequence in group.sequences:
            sequence.status = status
            self.tables.free(sequence)
        group.sequences.clear()
        if (on_outcome := self.queues.transfers.pop(group, None)) is not None:
            on_outcome(False)


def _is_plain(prompt: Sequence) -> bool:
    """Return whether a request's only sequence is plain; see ``Sequence.is_plain``."""
    params = prompt.params
    has_one_answer = params.n == 1 and params.beam is None
    keeps_blocks = params.kv_budget_tokens is None and not prompt.stops_after_prefill
    return has_one_answer and keeps_blocks and params.num_prompt_logprobs is None and prompt.samples_tokens
