"""The engine: it schedules a batch, runs the model on it and processes the result, step after step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from quire.engine.beam_search import BeamExtension, BeamSearch, Hypothesis
from quire.engine.block_pins import BlockPins
from quire.engine.block_pool import BlockListener, BlockPool
from quire.engine.block_tables import BlockTables
from quire.engine.cache_tiers import CacheTiers
from quire.engine.disk_cache import DiskCache
from quire.engine.host_cache import HostCache
from quire.engine.kv_memory import KvMemory
from quire.engine.limits import MIN_BUDGET_BLOCKS
from quire.engine.logits_processing import process_logits
from quire.engine.model_loader import UNLIMITED, LoadedModel
from quire.engine.model_runner import ModelRunner
from quire.engine.paged_eviction import PagedEviction
from quire.engine.request_errors import NoTokenLeftError, RequestFailedError, request_error
from quire.engine.sampler import are_finite, not_finite, rank_tokens
from quire.engine.sampling_step import SampledSequence, first_rows, sample_tokens
from quire.engine.scheduler import OnOutcome, Schedule, ScheduledSequence, Scheduler, SchedulerConfig
from quire.engine.sequence import (
    GeneratedToken,
    HashBlock,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)
from quire.engine.sequence_group import SequenceGroup
from quire.engine.speculation import DraftRequest, Speculator
from quire.engine.swap_cost import SwapCost
from quire.engine.swap_space import SwapSpace

logger = logging.getLogger(__name__)


class RequestTooLongError(ValueError):
    """The request can never fit into this worker; the message names the limit."""


class KvBudgetError(ValueError):
    """The worker cannot keep the request's KV budget; the message says why."""


@dataclass(slots=True)
class StepSeconds:
    """Seconds that each phase of the last step took."""

    propose: float = 0.0
    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    process: float = 0.0


class Engine:
    """Runs sequences over paged KV blocks. Not thread-safe: one thread owns it.

    Call ``grant_blocks`` after any call that may free blocks. ``step`` does so itself.

    Args:
        model: the model.
        memory: the model's KV blocks.
        config: the limits of a step.
        hash_block: computes the hash of a full block.
        listener: is told which blocks are cached.
        max_model_len: most tokens of a sequence; None means what the model and the pool allow.
        swap_memory: host blocks for preempted groups; None means that there are none.
        clock: returns seconds, for the times of a step.
        eviction: chooses the blocks that requests with a KV budget free.
        speculator: proposes draft tokens, which a step then verifies; None means one token per step.
        host_cache: keeps the blocks that the pool evicts; None means that they are discarded.
        disk_cache: keeps the blocks that the host cache evicts; needs a host cache.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: KvMemory,
        config: SchedulerConfig,
        hash_block: HashBlock,
        listener: BlockListener | None = None,
        max_model_len: int | None = None,
        swap_memory: KvMemory | None = None,
        clock: Callable[[], float] = perf_counter,
        eviction: PagedEviction | None = None,
        speculator: Speculator | None = None,
        host_cache: HostCache | None = None,
        disk_cache: DiskCache | None = None,
    ) -> None:
        self.model = model
        self.speculator = speculator
        self.memory = memory
        self.tiers = None if host_cache is None else CacheTiers(memory, host_cache, disk_cache, listener)
        self.pool = BlockPool(memory.num_blocks, listener, self.tiers)
        self.pins = BlockPins(self.pool, clock)
        self.swap_space = SwapSpace(swap_memory.num_blocks if swap_memory else 0)
        self._swap_cost = SwapCost(memory.shape.block_bytes)
        self.tables = BlockTables(
            self.pool, config.block_size, hash_block, model.window, config.max_num_batched_tokens, self.tiers
        )
        self.scheduler = Scheduler(
            config, self.pool, self.tables, self.swap_space, self._swap_cost.prefers_swap, self.tiers
        )
        self.runner = ModelRunner(model, memory, swap_memory)
        self._eviction = eviction or PagedEviction(memory)
        self.groups: dict[str, SequenceGroup] = {}
        self.step_seconds = StepSeconds()
        self.num_stepped = 0
        """Sequences that the last step computed, including beams of a beam search, which bring no updates."""
        self.num_step_tokens = 0
        """Tokens that the last step computed."""
        self._clock = clock
        self.max_model_len = longest_sequence(model, memory, max_model_len)
        """Most tokens of a sequence, prompt and output."""
        self._failed: dict[str, RequestFailedError] = {}
        """Errors of the requests that the current step ends, by request id."""

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that finished prefills and pins hold until they are released."""
        sequences = (s for group in self.groups.values() for s in group.sequences)
        return self.pins.num_blocks + sum(len(s.held_blocks) for s in sequences if s.status.is_finished)

    @property
    def oldest_pin_seconds(self) -> float:
        """How many seconds the oldest of ``num_pinned_blocks`` has been held; 0 if there are none."""
        sequences = (s for group in self.groups.values() for s in group.sequences)
        begun_at = [s.finished_at for s in sequences if s.status.is_finished and s.block_table]
        if self.pins.oldest_begun_at is not None:
            begun_at.append(self.pins.oldest_begun_at)
        return self._clock() - min(begun_at) if begun_at else 0.0

    @property
    def num_waiting_for_blocks(self) -> int:
        """Accepted requests whose blocks cannot all be allocated yet."""
        return len(self.scheduler.transfers)

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self.scheduler.running and not self.scheduler.waiting

    # --- the life of a request ----------------------------------------------------------------------------

    def add(self, prompt: Sequence) -> None:
        """Queue a request whose prompt this worker computes.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        self.scheduler.add(self._register(prompt))
        prompt.queued_at = self._clock()

    def accept(self, prompt: Sequence) -> int:
        """Take a request whose prompt another worker computes; return the index of the first block it lacks.

        The blocks before that index are cached here. The request holds a reference to them until it ends, or
        until no later token attends to them. If the request has several sequences, they sample their first
        tokens here: the prompt's last token is then computed by this worker and not by the other one.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        self._register(prompt)
        prompt.status = SequenceStatus.TRANSFERRING
        num_tokens = num_transferred_tokens(prompt)
        self.tables.bring_prefix(prompt)
        self.tables.take_cached_prefix(prompt, max_tokens=num_tokens)
        self.tables.drop_unseen(prompt, num_tokens)
        return len(prompt.block_table)

    def _register(self, prompt: Sequence) -> SequenceGroup:
        if prompt.num_tokens >= self.max_model_len:
            raise RequestTooLongError(
                f"{prompt.num_tokens} prompt tokens; this worker takes at most {self.max_model_len - 1}"
            )
        if prompt.request_id in self.groups:
            raise ValueError(f"request {prompt.request_id} is already here")
        params = prompt.params
        if params.kv_budget_tokens is not None:
            self._check_budget(params.kv_budget_tokens)
        group = SequenceGroup(prompt, [prompt])
        if params.beam is not None:
            max_tokens = min(params.max_tokens, self.max_model_len - prompt.num_prompt_tokens)
            group.beam = BeamSearch(params.beam, max_tokens, self._stop_token_ids(prompt))
        self._check_fits(group)
        self.groups[prompt.request_id] = group
        return group

    def _check_budget(self, num_tokens: int) -> None:
        least = MIN_BUDGET_BLOCKS * self.scheduler.config.block_size
        if num_tokens < least:
            raise KvBudgetError(f"must be at least {least}, {MIN_BUDGET_BLOCKS} blocks; got {num_tokens}")
        if any(window is not None for window in self.model.windows):
            raise KvBudgetError(
                "must be absent: the model has layers with sliding windows, for which distances count, and "
                "they are lost with blocks in between"
            )

    def _check_fits(self, group: SequenceGroup) -> None:
        params, num_prompt = group.params, group.prompt.num_prompt_tokens
        if params.num_sequences > self.scheduler.config.max_num_seqs:
            raise RequestTooLongError(
                f"{params.num_sequences} sequences of one request; "
                f"this worker runs at most {self.scheduler.config.max_num_seqs} at once"
            )
        num_tokens = min(num_prompt + params.max_tokens, self.max_model_len)
        num_blocks = self.tables.max_blocks(group, num_tokens)
        if num_blocks > self.pool.num_blocks:
            raise RequestTooLongError(
                f"{params.num_sequences} sequences of up to {num_tokens} tokens take {num_blocks} blocks; "
                f"this worker has {self.pool.num_blocks}: ask for fewer sequences or a lower max_tokens"
            )

    def reserve(self, request_id: str, on_outcome: OnOutcome) -> None:
        """Ask for the blocks of an accepted request's whole prompt; ``on_outcome`` later gets the outcome.

        ``on_outcome(True)`` means that the request got all of its blocks; it never gets only some of them.
        Accepted requests and requests that are computed here share one order of arrival.

        ``on_outcome(False)`` means that the request ended first. It may be ended to break a deadlock: waiting
        requests may hold cached prefixes, and if only these stand in the way, the newest waiting request is
        ended, since another worker may have room for it.

        Raises:
            KeyError: the request has ended.
        """
        self.scheduler.add_transfer(self.groups[request_id], on_outcome)

    def grant_blocks(self) -> None:
        """Give free blocks to waiting transfers; end the newest one if no other group will free blocks."""
        while self.scheduler.grant_oldest_transfer() or (self.is_idle and self._end_deadlocked_transfer()):
            pass

    def _end_deadlocked_transfer(self) -> bool:
        """End the newest waiting transfer if no other group will free blocks; return whether it was ended."""
        group = self.scheduler.newest_deadlocked_transfer()
        if group is None:
            return False
        del self.groups[group.request_id]
        self.scheduler.discard(group, SequenceStatus.FINISHED_ABORTED)
        return True

    def admit(self, request_id: str, first_token_id: int | None) -> SequenceUpdate:
        """Start decoding an accepted request whose prompt's blocks have all been written.

        Args:
            first_token_id: the token that the prefill worker sampled; None if all are sampled here.

        Raises:
            RequestFailedError: the request cannot go on.
        """
        group = self.groups[request_id]
        prompt = group.prompt
        prompt.num_computed_tokens = num_transferred_tokens(prompt)
        self.tables.seal(prompt)
        self._evict(prompt)
        if (error := self._failed.pop(request_id, None)) is not None:
            raise error
        prompt.status = SequenceStatus.WAITING
        if first_token_id is not None:
            prompt.token_ids.append(first_token_id)
            prompt.status = self._status_after_token(prompt)
        if prompt.status.is_finished:
            self._finish(prompt, prompt.status)
        else:
            self.scheduler.add(group)
            prompt.queued_at = self._clock()
        return SequenceUpdate(prompt, prompt.num_computed_tokens, [], prompt.status)

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; do nothing if it is unknown or finished."""
        group = self.groups.pop(request_id, None)
        if group is not None:
            self.scheduler.discard(group, SequenceStatus.FINISHED_ABORTED)

    def prefetch(self, block_hashes: Items[bytes], on_done: Callable[[], None]) -> None:
        """Read a chain's blocks that are on disk into host memory; call ``on_done`` when they are there."""
        if self.tiers is None or self.tiers.prefetch(block_hashes, on_done).is_done:
            on_done()

    def apply_disk_results(self) -> None:
        """Apply the disk reads and writes that have ended since the last call."""
        if self.tiers is not None:
            self.tiers.apply_disk_results()

    def pin(self, name: str, block_hashes: Items[bytes]) -> list[int]:
        """Begin a pin with the leading blocks that are in the pool or in host memory; return their ids."""
        if self.tiers is not None:
            self.tiers.promote_into(self.pool, block_hashes)
        return self.pins.pin(name, block_hashes)

    def unpin(self, name: str) -> None:
        """Drop a pin; do nothing if it is unknown."""
        self.pins.unpin(name)

    def clear_cache(self) -> int:
        """Drop the cached blocks that no request uses, in all tiers; return how many were dropped."""
        num_cached = self.pool.counts.cached
        self.pool.clear_cache()
        return num_cached + (self.tiers.clear() if self.tiers is not None else 0)

    def stop(self, sequence: Sequence) -> None:
        """End one sequence that a step has just advanced; the other sequences of its request go on."""
        if not sequence.status.is_finished:
            self._finish(sequence, SequenceStatus.FINISHED_STOPPED)

    def _finish(self, sequence: Sequence, status: SequenceStatus) -> None:
        group = self.groups[sequence.request_id]
        sequence.finished_at = self._clock()
        self.scheduler.finish(group, sequence, status)
        if not group.holds_blocks and not group.sequences:
            del self.groups[group.request_id]

    # --- one step -----------------------------------------------------------------------------------------

    def step(self) -> list[SequenceUpdate]:
        """Compute one batch and return an update for each of its sequences, except for unfinished beams."""
        updates = self._step()
        # This is needed even without a batch: a group that found no blocks may have given up its own.
        self.grant_blocks()
        while not self.num_stepped and self._end_deadlocked_transfer():
            updates = self._step()
            self.grant_blocks()
        return updates

    def _step(self) -> list[SequenceUpdate]:
        begin = self._clock()
        self._propose()
        start = self._clock()
        self.apply_disk_results()
        schedule = self.scheduler.schedule()
        self.step_seconds.propose = start - begin
        self.step_seconds.schedule = self._clock() - start
        self.num_stepped = len(schedule.sequences)
        for group in schedule.admitted:
            group.prompt.started_at = group.prompt.started_at or start
        self._move_blocks(schedule)
        if not schedule.sequences:
            return []
        num_tokens = sum(s.num_scheduled_tokens for s in schedule.sequences)
        num_decoding = sum(s.num_scheduled_tokens == s.num_sampled_rows for s in schedule.sequences)
        logits, prompt_logits = self._run(schedule.sequences)
        start = self._clock()
        self._failed.clear()
        self._score_prompts(schedule.sequences, prompt_logits)
        updates = self._advance(schedule.sequences)
        sampled = self._sequences_to_sample(schedule.sequences)
        self._failed |= sample_tokens(sampled, logits, self.model.eos_token_ids, self._status_after_token)
        sampled_at = self._clock()
        updates += self._advance_beam_searches(schedule.sequences, logits)
        updates += [
            self._record_sampled(each) for each in sampled if each.sequence.request_id not in self._failed
        ]
        updates = self._without_failed(updates)
        end = self._clock()
        self.step_seconds.sample = sampled_at - start
        self.step_seconds.process = end - sampled_at
        if self.speculator is not None and num_decoding == len(schedule.sequences):
            num_sampled = sum(len(each.tokens) for each in sampled)
            self.speculator.record_step(num_tokens, num_sampled, self.step_seconds.forward, end - begin)
        return updates

    def _propose(self) -> None:
        """Propose draft tokens for the sequences that decode, except for the beams of a beam search."""
        if self.speculator is None:
            return
        requests = []
        for group in self.scheduler.running:
            group.drop_drafts()
            is_sampling = group.prompt.samples_tokens and not group.prompt.stops_after_prefill
            if group.beam is not None or not is_sampling or not (group.is_forked or group.params.n == 1):
                continue
            if group.params.kv_budget_tokens is not None:  # each token decides which blocks are evicted
                continue
            requests += [
                DraftRequest(sequence, num_wanted)
                for sequence in group.sequences
                if sequence.num_tokens == sequence.num_computed_tokens + 1
                and (num_wanted := self._max_tokens_left(sequence) - 1) > 0
            ]
        self.speculator.propose(requests)

    def _move_blocks(self, schedule: Schedule) -> None:
        if not schedule.moves_blocks:
            return
        start = self._clock()
        self.runner.move_blocks(schedule)
        if self.tiers is not None:
            self.tiers.promote(schedule.promotions)
        num_swapped = len(schedule.swap_out) + len(schedule.swap_in)
        self._swap_cost.record_swap(num_swapped, self._clock() - start)
        self.scheduler.on_blocks_moved(schedule)

    def _run(self, scheduled: list[ScheduledSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the model; return the logits to sample from, and the logits for prompt logprobs.

        Their shapes are ``[num_rows, vocab_size]``. The first has ``num_sampled_rows`` rows a sequence.
        """
        start = self._clock()
        arguments = self.runner.prepare(scheduled)
        prepared = self._clock()
        logits = self.runner.forward(arguments)
        computed = self._clock()
        self.step_seconds.prepare = prepared - start
        self.step_seconds.forward = computed - prepared
        self.num_step_tokens = sum(s.num_scheduled_tokens for s in scheduled)
        self._swap_cost.record_forward(self.num_step_tokens, computed - prepared)
        num_sampled_rows = sum(s.num_sampled_rows for s in scheduled)
        return logits[:num_sampled_rows], logits[num_sampled_rows:]

    def _score_prompts(self, scheduled: list[ScheduledSequence], logits: torch.Tensor) -> None:
        """Record the logprobs of prompt tokens that this step's logits give, where they are requested."""
        start = 0
        for sequence, num_tokens in scheduled:
            if positions := sequence.positions_to_score(num_tokens):
                rows = logits[start : start + len(positions)].float()
                start += len(positions)
                following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
                num_top = sequence.params.num_prompt_logprobs or 0
                with self._failing(sequence.request_id):
                    if not are_finite(rows).all():
                        raise not_finite()
                    sequence.prompt_logprobs += rank_tokens(rows, following, num_top)

    def _advance(self, scheduled: list[ScheduledSequence]) -> list[SequenceUpdate]:
        """Record what has been computed; return updates of the sequences that sample no token in this step.

        These are prompts that are not done yet, and prompts whose first token is sampled elsewhere.
        """
        updates = []
        for sequence, num_tokens in scheduled:
            sequence.num_computed_tokens += num_tokens - len(sequence.draft_token_ids)
            self.tables.seal(sequence)
            self.tables.drop_unseen(sequence, sequence.num_computed_tokens)
            self._evict(sequence)
            is_done = sequence.num_computed_tokens == sequence.num_tokens
            if is_done and sequence.samples_tokens:
                continue
            if is_done:
                self._finish(sequence, SequenceStatus.FINISHED_HANDED_OVER)
            updates.append(SequenceUpdate(sequence, sequence.num_computed_tokens, [], sequence.status))
        return updates

    def _evict(self, sequence: Sequence) -> None:
        """Free the blocks that exceed a sequence's KV budget."""
        indices: list[int] = []
        with self._failing(sequence.request_id):
            indices = self._eviction.choose(sequence)
        if indices:
            self.tables.drop(sequence, indices)

    def _sequences_to_sample(self, scheduled: list[ScheduledSequence]) -> list[SampledSequence]:
        """Return the sequences that were computed to their end; fork the samples of new prompts first."""
        chosen = []
        for (sequence, _), row in zip(scheduled, first_rows(scheduled), strict=True):
            group = self.groups[sequence.request_id]
            if (
                sequence.num_computed_tokens < sequence.num_tokens
                or not sequence.samples_tokens
                or group.beam
            ):
                continue
            if group.request_id in self._failed:
                continue
            # The prompt's last row gives the first token of every sample.
            sequences = [sequence] if group.is_forked else group.fork_samples(self.pool)
            chosen += [SampledSequence(each, row, []) for each in sequences]
        return chosen

    def _record_sampled(self, sampled: SampledSequence) -> SequenceUpdate:
        """Keep the blocks of accepted draft tokens, drop the rest, and free the sequence if it has ended."""
        sequence = sampled.sequence
        num_computed, num_accepted = sequence.num_computed_tokens, 0
        if sequence.draft_token_ids and self.speculator is not None:
            num_accepted = sampled.num_accepted_tokens
            self.speculator.record_verification(sequence, len(sequence.draft_token_ids), num_accepted)
            sequence.num_computed_tokens += num_accepted
            sequence.draft_token_ids = []
            self.tables.seal(sequence)
            self.tables.trim(sequence)
        if sequence.status.is_finished:
            self._finish(sequence, sequence.status)
        return SequenceUpdate(
            sequence, num_computed, sampled.tokens, sequence.status, num_accepted_tokens=num_accepted
        )

    def _advance_beam_searches(
        self, scheduled: list[ScheduledSequence], logits: torch.Tensor
    ) -> list[SequenceUpdate]:
        """Advance each beam search whose beams have all been computed."""
        rows = {id(s.sequence): row for s, row in zip(scheduled, first_rows(scheduled), strict=True)}
        names = dict.fromkeys(sequence.request_id for sequence, _ in scheduled)
        updates = []
        for group in (self.groups[name] for name in names if name in self.groups):
            beams = group.sequences
            if group.beam is None or any(s.num_computed_tokens < s.num_tokens for s in beams):
                continue
            extensions: list[BeamExtension] = []
            with self._failing(group.request_id):
                extensions = self._extensions(group.beam, beams, logits[[rows[id(beam)] for beam in beams]])
            if group.request_id in self._failed:
                continue
            if group.beam.is_done:
                updates += self._end_beam_search(group, group.beam.hypotheses)
                continue
            group.extend_beams(extensions, self.pool)
        return updates

    def _extensions(
        self, search: BeamSearch, beams: list[Sequence], logits: torch.Tensor
    ) -> list[BeamExtension]:
        """Return the extensions that a beam search chooses; a beam that no token may follow gets none.

        Args:
            search: the state of the beam search.
            beams: its beams, in the order of the last step's extensions.
            logits: ``[num_beams, vocab_size]``.
        """
        outputs = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
        logits = logits.float()
        if not are_finite(logits).all():
            raise not_finite()
        # As in transformers, the rules change logprobs, whose probabilities then no longer sum to one.
        logprobs = process_logits(torch.log_softmax(logits, dim=-1), beams, self.model.eos_token_ids)
        errors = [beam.logits_rules.error for beam in beams if beam.logits_rules is not None]
        for error in errors:
            # A beam that no token may follow simply ends. A beam whose format has failed might have been
            # the best one, so the whole request fails.
            if error is not None and not isinstance(error, NoTokenLeftError):
                raise error
        extensions = search.advance(logprobs, outputs)
        if search.is_done and not search.hypotheses:
            raise next((error for error in errors if error is not None), not_finite())
        return extensions

    def _end_beam_search(self, group: SequenceGroup, hypotheses: list[Hypothesis]) -> list[SequenceUpdate]:
        """End a beam search; return one update for each answer, the best first."""
        del self.groups[group.request_id]
        self.scheduler.discard(group, SequenceStatus.FINISHED_STOPPED)
        prompt = group.prompt.token_ids[: group.prompt.num_prompt_tokens]
        updates = []
        for index, (score, token_ids, is_stopped) in enumerate(hypotheses):
            answer = replace(group.prompt, index=index, token_ids=prompt + token_ids, block_table=[])
            answer.status = SequenceStatus.FINISHED_STOPPED if is_stopped else SequenceStatus.FINISHED_LENGTH
            tokens = [GeneratedToken(token_id, None) for token_id in token_ids]
            updates.append(SequenceUpdate(answer, answer.num_tokens, tokens, answer.status, score))
        return updates

    @contextmanager
    def _failing(self, request_id: str) -> Iterator[None]:
        """Turn an exception in the block into a failure of this request only."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, RequestFailedError):
                logger.exception("request %s has failed", request_id)
            self._failed.setdefault(request_id, request_error(error))

    def _without_failed(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        """End the requests that failed in this step and replace their updates by one with the error."""
        if not self._failed:
            return updates
        kept = [update for update in updates if update.sequence.request_id not in self._failed]
        return kept + [self._fail(request_id, error) for request_id, error in self._failed.items()]

    def _fail(self, request_id: str, error: RequestFailedError) -> SequenceUpdate:
        group = self.groups[request_id]
        prompt, status = group.prompt, SequenceStatus.FINISHED_FAILED
        if prompt.stops_after_prefill:
            # A transfer may be reading its blocks. Like those of a finished prefill, they stay until
            # they are released.
            self._finish(prompt, status)
        else:
            del self.groups[request_id]
            self.scheduler.discard(group, status)
        return SequenceUpdate(prompt, prompt.num_computed_tokens, [], status, error=error)

    def _status_after_token(self, sequence: Sequence) -> SequenceStatus:
        params = sequence.params
        may_stop = sequence.num_output_tokens >= params.min_tokens
        if may_stop and sequence.token_ids[-1] in self._stop_token_ids(sequence):
            return SequenceStatus.FINISHED_STOPPED
        if sequence.num_output_tokens >= params.max_tokens or sequence.num_tokens >= self.max_model_len:
            return SequenceStatus.FINISHED_LENGTH
        if sequence.stops_after_prefill:
            return SequenceStatus.FINISHED_HANDED_OVER
        return SequenceStatus.DECODING

    def _max_tokens_left(self, sequence: Sequence) -> int:
        left = sequence.params.max_tokens - sequence.num_output_tokens
        return min(left, self.max_model_len - sequence.num_tokens)

    def _stop_token_ids(self, sequence: Sequence) -> frozenset[int]:
        params = sequence.params
        return (
            params.stop_token_ids if params.ignore_eos else params.stop_token_ids | self.model.eos_token_ids
        )

    def check_conservation(self) -> None:
        """Raise AssertionError unless each used block, in the pool and on the host, has a group or pin."""
        self.pool.check_conservation()
        if self.tiers is not None:
            self.tiers.check_conservation(self.pool)
        groups = self.groups.values()
        held = {block_id for group in groups for s in group.sequences for block_id in s.held_blocks}
        held |= self.pins.block_ids
        assert len(held) == self.pool.counts.used, f"{self.pool.counts.used - len(held)} blocks have leaked"
        swapped = [host_id for group in groups if group.swapped for host_id in group.swapped.host_ids]
        num_used = self.swap_space.num_blocks - self.swap_space.num_free
        assert len(swapped) == len(set(swapped)) == num_used, "host blocks have leaked"


def longest_sequence(model: LoadedModel, memory: KvMemory, max_model_len: int | None = None) -> int:
    """Return the most tokens of a sequence, which the model, the pool and ``max_model_len`` limit.

    With a sliding window in every layer, the pool need not hold a whole sequence.
    """
    capacity = memory.num_blocks * memory.shape.block_size if model.window is None else UNLIMITED
    return min(model.max_position_embeddings, capacity, max_model_len or UNLIMITED)


def num_transferred_tokens(prompt: Sequence) -> int:
    """Return how many of a request's prompt tokens the prefill worker computes.

    It computes all of them if the request has one sequence, whose first token it also samples. If there are
    several sequences, the decode worker needs the last token's logits and computes that token itself.
    """
    return prompt.num_tokens if prompt.params.num_sequences == 1 else prompt.num_tokens - 1
