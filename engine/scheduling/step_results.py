"""Turns the logits of a step into tokens, and the tokens into updates of sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quire.engine.errors import RequestFailedError, RequestFailures
from quire.engine.scheduling.requests import Requests
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.sequences.beam_search import BeamExtension, answers, choose_extensions
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.paged_eviction import PagedEviction
from quire.engine.sequences.sampling_step import (
    SampledRows,
    first_rows,
    num_accepted_tokens,
    pool_prompts,
    sample_tokens,
    score_prompts,
)
from quire.engine.sequences.sequence import ScheduledSequence, Sequence, SequenceStatus, SequenceUpdate
from quire.engine.sequences.stop_rules import StopRules


@dataclass(eq=False)
class StepResults:
    """Processes the results of each step. The engine calls the methods in the order of their definition.

    An exception in the processing of one request ends that request only.

    Args:
        requests: the requests of the engine.
        tables: the ledger of their blocks.
        eviction: chooses the blocks that requests with a KV budget free.
        stop_rules: decide when a sequence ends.
        record_drafts: records a sequence's draft tokens, and how many of them were right.
    """

    requests: Requests
    tables: BlockTables
    eviction: PagedEviction
    stop_rules: StopRules
    record_drafts: Callable[[Sequence, int, int], None] | None
    # Of the current step:
    _failures: RequestFailures = field(default_factory=RequestFailures, init=False)
    _to_sample: SampledRows = field(default_factory=lambda: SampledRows([], []), init=False)
    _beam_searches: dict[str, None] = field(default_factory=dict, init=False)

    def record_computed_tokens(
        self,
        scheduled: list[ScheduledSequence],
        prompt_logits: torch.Tensor | None,
        hidden: torch.Tensor | None = None,
    ) -> list[SequenceUpdate]:
        """Record the computed tokens; return updates of the sequences that sample no token in this step.

        These are prompts that are not done yet, and prompts whose first token is sampled elsewhere.
        """
        self._failures, self._beam_searches = RequestFailures(), {}
        self._to_sample = sequences, rows = SampledRows([], [])
        if prompt_logits is not None:
            score_prompts(scheduled, prompt_logits, self._failures)
        if hidden is not None:
            pool_prompts(scheduled, hidden, self._failures)
        updates, tables, row = [], self.tables, 0
        for sequence, num_tokens in scheduled:
            num_drafts = len(sequence.draft_token_ids)
            sequence.num_computed_tokens = num_computed = (
                sequence.num_computed_tokens + num_tokens - num_drafts
            )
            if num_computed // tables.block_size != sequence.num_sealed_blocks:
                tables.seal(sequence)
            if tables.window is not None:
                tables.drop_unseen(sequence, num_computed)
            is_done = num_computed == len(sequence.token_ids)
            if is_done and sequence.is_plain:
                sequences.append(sequence)
                rows.append(row)
            elif not self._samples_later(sequence, row, is_done):
                updates.append(SequenceUpdate(sequence, num_computed, [], sequence.status))
            row += 1 + num_drafts
        return updates

    def _samples_later(self, sequence: Sequence, row: int, is_done: bool) -> bool:
        """Record which tokens a sequence that is not plain samples; return False if it samples none.

        Args:
            sequence: the sequence, whose computed tokens have been counted.
            row: the row of logits after its last token.
            is_done: whether all its tokens have been computed.
        """
        if sequence.params.kv_budget_tokens is not None:
            self._evict(sequence)
        if not is_done:
            return False
        if not sequence.samples_tokens and sequence.attempt_id not in self._failures:
            self.requests.finish_sequence(sequence, SequenceStatus.FINISHED_HANDED_OVER)
            return False
        group = self.requests.groups[sequence.attempt_id]
        if group.beam is not None:
            self._beam_searches[sequence.attempt_id] = None
        elif sequence.attempt_id not in self._failures:
            # The prompt's last row gives the first token of every sample.
            samples = [sequence] if group.is_forked else group.fork_samples(self.tables)
            self._to_sample.sequences.extend(samples)
            self._to_sample.rows.extend([row] * len(samples))
        return True

    def _evict(self, sequence: Sequence) -> None:
        """Free the blocks that exceed a sequence's KV budget."""
        excess: list[int] = []
        with self._failures.catch(sequence.attempt_id):
            excess = self.eviction.choose(sequence)
        self.tables.drop(sequence, excess)

    def sample(self, logits: torch.Tensor) -> list[SequenceUpdate]:
        """Sample tokens for sequences without uncomputed tokens; return updates with the new tokens."""
        to_sample, failures = self._to_sample, self._failures
        if failures.errors:  # another sequence of the same request may have failed
            pairs = zip(*to_sample, strict=True)
            kept = [each for each in pairs if each[0].attempt_id not in failures]
            to_sample = SampledRows([sequence for sequence, _ in kept], [row for _, row in kept])
        updates, errors = sample_tokens(to_sample, logits, self.stop_rules)
        failures.errors |= errors
        return updates

    def advance_beam_searches(
        self, scheduled: list[ScheduledSequence], logits: torch.Tensor
    ) -> list[SequenceUpdate]:
        """Advance beam searches whose beams are all computed; return an update or the answers of each."""
        groups = self._computed_beam_searches()
        if not groups:
            return []
        rows = {id(s.sequence): row for s, row in zip(scheduled, first_rows(scheduled), strict=True)}
        updates = []
        for group in groups:
            assert group.beam is not None
            beams = group.sequences
            extensions: list[BeamExtension] = []
            with self._failures.catch(group.attempt_id):
                beam_logits = logits[[rows[id(beam)] for beam in beams]]
                extensions = choose_extensions(group.beam, beams, beam_logits, self.stop_rules.eos_token_ids)
            if group.attempt_id in self._failures:
                continue
            # The last step of a search extends no beam: it ends answers.
            group.prompt.tally.num_generated_tokens += len(extensions or group.beam.hypotheses)
            if group.beam.is_done:
                self.requests.discard_group(group, SequenceStatus.FINISHED_STOPPED)
                updates += answers(group.beam, group.prompt)
            else:
                group.extend_beams(extensions, self.tables)
                num_computed = group.sequences[0].num_computed_tokens
                updates.append(SequenceUpdate(group.prompt, num_computed, [], SequenceStatus.DECODING))
        return updates

    def _computed_beam_searches(self) -> list[SequenceGroup]:
        groups = [self.requests.groups[attempt_id] for attempt_id in self._beam_searches]
        return [
            group for group in groups if all(s.num_computed_tokens == s.num_tokens for s in group.sequences)
        ]

    def end_sampled(self, sampled: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """Free the sequences that the step has ended; return all updates except those of failed requests."""
        if self._failures.errors:
            sampled = [each for each in sampled if each.sequence.attempt_id not in self._failures]
        if self.record_drafts is not None:
            for each in sampled:
                if each.sequence.draft_token_ids:
                    self._keep_accepted(each, self.record_drafts)
        for ended in [each for each in sampled if each.status is not SequenceStatus.DECODING]:
            self.requests.finish_sequence(ended.sequence, ended.status)
        return sampled

    def _keep_accepted(
        self, update: SequenceUpdate, record_drafts: Callable[[Sequence, int, int], None]
    ) -> None:
        """Keep the blocks of a sequence's accepted draft tokens, drop the rest, and complete its update."""
        sequence = update.sequence
        update.status, update.num_accepted_tokens = sequence.status, num_accepted_tokens(update)
        record_drafts(sequence, len(sequence.draft_token_ids), update.num_accepted_tokens)
        sequence.num_computed_tokens += update.num_accepted_tokens
        sequence.draft_token_ids = []
        self.tables.seal(sequence)
        self.tables.trim(sequence)

    def end_failed_requests(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """End the requests that failed in this step; replace all updates of each by one with the error."""
        if not self._failures.errors:
            return updates
        kept = [update for update in updates if update.sequence.attempt_id not in self._failures]
        return kept + [self._fail(attempt_id, error) for attempt_id, error in self._failures.errors.items()]

    def _fail(self, attempt_id: str, error: RequestFailedError) -> SequenceUpdate:
        group = self.requests.groups[attempt_id]
        prompt, status = group.prompt, SequenceStatus.FINISHED_FAILED
        if prompt.stops_after_prefill:
            # A transfer may be reading its blocks. Like those of a finished prefill, they stay until they
            # are released.
            self.requests.finish_sequence(prompt, status)
        else:
            self.requests.discard_group(group, status)
        return SequenceUpdate(prompt, prompt.num_computed_tokens, [], status, error=error)
