"""Turns the logits of a step into tokens, and the tokens into updates of sequences."""

from __future__ import annotations

import torch

from quire.engine.beam_search import BeamExtension, answers, choose_extensions
from quire.engine.block_tables import BlockTables
from quire.engine.paged_eviction import PagedEviction
from quire.engine.request_errors import RequestFailedError, RequestFailures
from quire.engine.requests import Requests
from quire.engine.sampling_step import SampledSequence, first_rows, sample_tokens, score_prompts
from quire.engine.schedule import ScheduledSequence
from quire.engine.sequence import Sequence, SequenceStatus, SequenceUpdate
from quire.engine.sequence_group import SequenceGroup
from quire.engine.speculation import Speculator
from quire.engine.stop_rules import StopRules


class StepResults:
    """Processes the results of one step after another; each step calls the methods in their order.

    An exception in the processing of one request ends that request only.

    Args:
        requests: the requests of the engine.
        tables: the ledger of their blocks.
        eviction: chooses the blocks that requests with a KV budget free.
        stop_rules: decide when a sequence ends.
        speculator: learns how many draft tokens were right; None means that there are none.
    """

    def __init__(
        self,
        requests: Requests,
        tables: BlockTables,
        eviction: PagedEviction,
        stop_rules: StopRules,
        speculator: Speculator | None,
    ) -> None:
        self._requests = requests
        self._tables = tables
        self._eviction = eviction
        self._stop_rules = stop_rules
        self._speculator = speculator
        self._failures = RequestFailures()

    def record_computed_tokens(
        self, scheduled: list[ScheduledSequence], prompt_logits: torch.Tensor
    ) -> list[SequenceUpdate]:
        """Record what has been computed; return updates of the sequences that sample no token in this step.

        These are prompts that are not done yet, and prompts whose first token is sampled elsewhere.
        """
        self._failures = RequestFailures()
        score_prompts(scheduled, prompt_logits, self._failures)
        updates, tables = [], self._tables
        for sequence, num_tokens in scheduled:
            sequence.num_computed_tokens += num_tokens - len(sequence.draft_token_ids)
            tables.seal(sequence)
            tables.drop_unseen(sequence, sequence.num_computed_tokens)
            if sequence.params.kv_budget_tokens is not None:
                self._evict(sequence)
            is_done = sequence.num_computed_tokens == len(sequence.token_ids)
            if is_done and sequence.samples_tokens:
                continue
            if is_done:
                self._requests.finish_sequence(sequence, SequenceStatus.FINISHED_HANDED_OVER)
            updates.append(SequenceUpdate(sequence, sequence.num_computed_tokens, [], sequence.status))
        return updates

    def _evict(self, sequence: Sequence) -> None:
        """Free the blocks that exceed a sequence's KV budget."""
        excess: list[int] = []
        with self._failures.catch(sequence.attempt_id):
            excess = self._eviction.choose(sequence)
        self._tables.drop(sequence, excess)

    def sample(self, scheduled: list[ScheduledSequence], logits: torch.Tensor) -> list[SampledSequence]:
        """Sample tokens for the sequences that were computed to their end."""
        sampled = self._sequences_to_sample(scheduled)
        rules = self._stop_rules
        errors = sample_tokens(sampled, logits, rules.eos_token_ids, rules.status_after_token)
        self._failures.errors |= errors
        return sampled

    def _sequences_to_sample(self, scheduled: list[ScheduledSequence]) -> list[SampledSequence]:
        """Return the sequences that were computed to their end; fork the samples of new prompts first."""
        to_sample = []
        groups, errors = self._requests.groups, self._failures.errors
        for (sequence, _), row in zip(scheduled, first_rows(scheduled), strict=True):
            if sequence.num_computed_tokens != len(sequence.token_ids) or not sequence.samples_tokens:
                continue
            group = groups[sequence.attempt_id]
            if group.beam is not None or sequence.attempt_id in errors:
                continue
            if group.is_forked:
                to_sample.append(SampledSequence(sequence, row, []))
            else:
                # The prompt's last row gives the first token of every sample.
                forked = group.fork_samples(self._tables)
                to_sample += [SampledSequence(each, row, []) for each in forked]
        return to_sample

    def advance_beam_searches(
        self, scheduled: list[ScheduledSequence], logits: torch.Tensor
    ) -> list[SequenceUpdate]:
        """Advance beam searches whose beams have all been computed; return the answers of those that end."""
        groups = self._computed_beam_searches(scheduled)
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
                extensions = choose_extensions(group.beam, beams, beam_logits, self._stop_rules.eos_token_ids)
            if group.attempt_id in self._failures:
                continue
            if group.beam.is_done:
                self._requests.discard_group(group, SequenceStatus.FINISHED_STOPPED)
                updates += answers(group.beam, group.prompt)
            else:
                group.extend_beams(extensions, self._tables)
        return updates

    def _computed_beam_searches(self, scheduled: list[ScheduledSequence]) -> list[SequenceGroup]:
        groups = self._requests.groups
        names = dict.fromkeys(s.attempt_id for s, _ in scheduled if s.params.beam is not None)
        return [
            group
            for group in (groups[name] for name in names if name in groups)
            if group.beam is not None and all(s.num_computed_tokens == s.num_tokens for s in group.sequences)
        ]

    def record_sampled_tokens(self, sampled: list[SampledSequence]) -> list[SequenceUpdate]:
        """Return updates with the sampled tokens, except for requests that have failed."""
        errors = self._failures.errors
        return [self._record_sampled(s) for s in sampled if s.sequence.attempt_id not in errors]

    def _record_sampled(self, sampled: SampledSequence) -> SequenceUpdate:
        """Keep the blocks of accepted draft tokens, drop the rest, and free the sequence if it has ended."""
        sequence = sampled.sequence
        num_computed, num_accepted = sequence.num_computed_tokens, 0
        if sequence.draft_token_ids and self._speculator is not None:
            num_accepted = sampled.num_accepted_tokens
            self._speculator.record_verification(sequence, len(sequence.draft_token_ids), num_accepted)
            sequence.num_computed_tokens += num_accepted
            sequence.draft_token_ids = []
            self._tables.seal(sequence)
            self._tables.trim(sequence)
        status = sequence.status
        if status != SequenceStatus.DECODING and status.is_finished:
            self._requests.finish_sequence(sequence, status)
        return SequenceUpdate(sequence, num_computed, sampled.tokens, status, None, num_accepted)

    def end_failed_requests(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """End the requests that failed in this step; replace their updates by one with the error."""
        if not self._failures.errors:
            return updates
        kept = [update for update in updates if update.sequence.attempt_id not in self._failures]
        return kept + [self._fail(attempt_id, error) for attempt_id, error in self._failures.errors.items()]

    def _fail(self, attempt_id: str, error: RequestFailedError) -> SequenceUpdate:
        group = self._requests.groups[attempt_id]
        prompt, status = group.prompt, SequenceStatus.FINISHED_FAILED
        if prompt.stops_after_prefill:
            # A transfer may be reading its blocks. Like those of a finished prefill, they stay until they
            # are released.
            self._requests.finish_sequence(prompt, status)
        else:
            self._requests.discard_group(group, status)
        return SequenceUpdate(prompt, prompt.num_computed_tokens, [], status, error=error)
