"""The engine: schedule, run, process, one step after the other."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from quire.engine.beam_search import BeamSearch, Hypothesis
from quire.engine.block_pins import BlockPins
from quire.engine.block_pool import BlockListener, BlockPool, NoFreeBlocksError
from quire.engine.block_tables import BlockTables
from quire.engine.cache_tiers import CacheTiers
from quire.engine.disk_cache import DiskCache
from quire.engine.drawing import Drawing, draw, first_rows
from quire.engine.group import SequenceGroup
from quire.engine.host_cache import HostCache
from quire.engine.kv_memory import KvMemory
from quire.engine.limits import MIN_BUDGET_BLOCKS
from quire.engine.logits_processing import process_logits
from quire.engine.model_loader import UNLIMITED, LoadedModel
from quire.engine.model_runner import ModelRunner
from quire.engine.paged_eviction import PagedEviction
from quire.engine.sampler import rank_tokens
from quire.engine.scheduler import Schedule, ScheduledSequence, Scheduler, SchedulerConfig
from quire.engine.sequence import (
    GeneratedToken,
    HashBlock,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)
from quire.engine.speculation import Speculator, Wanted
from quire.engine.swap_cost import SwapCost
from quire.engine.swap_space import SwapSpace

OnSettled = Callable[[bool], None]
"""Is told whether the blocks were given."""


class RequestTooLongError(ValueError):
    """A request can never fit into this worker; the message names the limit."""


class KvBudgetError(ValueError):
    """A request's KV budget cannot be kept here; the message says why."""


@dataclass(slots=True)
class StepSeconds:
    """Where the time of the last step went."""

    propose: float = 0.0
    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    process: float = 0.0


class Engine:
    """Runs sequences over paged KV blocks. Not thread-safe: one thread owns it.

    Any call between two steps may let blocks come free: ``grant_blocks`` follows it, and ends each step.

    Args:
        model: the model.
        memory: its KV blocks.
        config: limits of a step.
        hash_block: names full blocks.
        listener: hears which blocks are cached.
        max_model_len: most tokens of a sequence; None means what model and pool allow.
        swap_memory: host blocks for preempted groups; None means none.
        clock: for the times of a step.
        eviction: chooses what requests with a KV budget give back.
        speculator: guesses tokens, several of which a step then verifies; None means one token a step.
        host_cache: where blocks that the pool evicts live on; None means nowhere.
        disk_cache: where blocks that the host cache evicts live on; needs a host cache.
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
        """Sequences that the last step computed; a search's beams among them, which bring no updates."""
        self.num_step_tokens = 0
        """Tokens that the last step computed."""
        self._clock = clock
        self.max_model_len = longest_sequence(model, memory, max_model_len)
        """Most tokens of a sequence."""
        self._waiting_for_blocks: dict[str, OnSettled] = {}

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that finished prefills and pins hold until they are released."""
        sequences = (s for group in self.groups.values() for s in group.sequences)
        return self.pins.num_blocks + sum(len(s.held_blocks) for s in sequences if s.status.is_finished)

    @property
    def oldest_pin_seconds(self) -> float:
        """How long the oldest of those blocks has been held; 0 without any."""
        sequences = (s for group in self.groups.values() for s in group.sequences)
        begun_at = [s.finished_at for s in sequences if s.status.is_finished and s.block_table]
        if self.pins.oldest_begun_at is not None:
            begun_at.append(self.pins.oldest_begun_at)
        return self._clock() - min(begun_at) if begun_at else 0.0

    @property
    def num_waiting_for_blocks(self) -> int:
        """Accepted requests whose blocks cannot all be allocated yet."""
        return len(self._waiting_for_blocks)

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self.scheduler.running and not self.scheduler.waiting

    # --- the life of a request ----------------------------------------------------------------------------

    def add(self, prompt: Sequence) -> None:
        """Take a request to compute here.

        Raises:
            RequestTooLongError: it can never fit.
            KvBudgetError: it has a KV budget that cannot be kept.
        """
        self.scheduler.add(self._register(prompt))
        prompt.queued_at = self._clock()

    def accept(self, prompt: Sequence) -> int:
        """Take a request whose prompt is computed elsewhere; return the index of the first block it lacks.

        Those before it are held here and referenced until the request ends, or no token to come sees them.
        Several sequences draw their first tokens here, from the prompt's last token, which is then computed
        here and not elsewhere.

        Raises:
            RequestTooLongError: it can never fit.
            KvBudgetError: it has a KV budget that cannot be kept.
        """
        group = self._register(prompt)
        self.scheduler.stamp_arrival(group)
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

    def reserve(self, request_id: str, on_settled: OnSettled) -> None:
        """Call back with True, later, when an accepted sequence has been granted blocks for its whole prompt.

        All or nothing and first come first served. A request that ends before that is called back with
        False. So is one that is ended for it: requests that wait may hold cached prefixes, and where these
        alone are in the way, the newest gives way, since another worker may have room.

        Raises:
            KeyError: the request has ended.
        """
        self.groups[request_id]
        self._waiting_for_blocks[request_id] = on_settled

    def grant_blocks(self) -> None:
        """Give transfers what has come free; end the newest where nobody else will give blocks back."""
        while self._waiting_for_blocks:
            request_id, on_settled = next(iter(self._waiting_for_blocks.items()))
            try:
                self.tables.reserve(self.groups[request_id].prompt)
            except NoFreeBlocksError:
                if self._others_give_back():
                    return
                request_id, on_settled = self._waiting_for_blocks.popitem()
                self.scheduler.discard(self.groups.pop(request_id), SequenceStatus.FINISHED_ABORTED)
                on_settled(False)
            else:
                del self._waiting_for_blocks[request_id]
                on_settled(True)

    def _others_give_back(self) -> bool:
        """Whether anything but the requests that wait for blocks holds some."""
        waiting = (self.groups[request_id].prompt for request_id in self._waiting_for_blocks)
        held = {block_id for prompt in waiting for block_id in prompt.held_blocks}
        return self.pool.counts.used > len(held)

    def admit(self, request_id: str, first_token_id: int | None) -> SequenceUpdate:
        """Start decoding an accepted request whose prompt's blocks have all been written.

        Args:
            first_token_id: the token that was drawn elsewhere; None if all are drawn here.
        """
        group = self.groups[request_id]
        prompt = group.prompt
        prompt.num_computed_tokens = num_transferred_tokens(prompt)
        self.tables.seal(prompt)
        self._evict(prompt)
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
        """End a request and free its blocks; unknown and finished ones are no error."""
        group = self.groups.pop(request_id, None)
        if group is not None:
            on_settled = self._waiting_for_blocks.pop(request_id, None)
            self.scheduler.discard(group, SequenceStatus.FINISHED_ABORTED)
            if on_settled is not None:
                on_settled(False)

    def prefetch(self, block_hashes: Items[bytes], on_done: Callable[[], None]) -> None:
        """Read the blocks of a chain that are on disk into host memory; call back when they are there."""
        if self.tiers is None or self.tiers.prefetch(block_hashes, on_done).is_done:
            on_done()

    def settle(self) -> None:
        """Take in blocks that have come from disk meanwhile."""
        if self.tiers is not None:
            self.tiers.settle()

    def pin(self, name: str, block_hashes: Items[bytes]) -> list[int]:
        """Begin a pin with the leading blocks that are in the pool or in host memory; return their ids."""
        if self.tiers is not None:
            self.tiers.promote_into(self.pool, block_hashes)
        return self.pins.pin(name, block_hashes)

    def unpin(self, name: str) -> None:
        """Drop a pin; unknown ones are no error."""
        self.pins.unpin(name)

    def clear_cache(self) -> int:
        """Forget the blocks that no request uses, in all tiers; return how many."""
        num_cached = self.pool.counts.cached
        self.pool.clear_cache()
        return num_cached + (self.tiers.clear() if self.tiers is not None else 0)

    def stop(self, sequence: Sequence) -> None:
        """End one sequence that a step has just advanced; the others of its request go on."""
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
        """Compute one batch and return what it did for each sequence in it."""
        updates = self._step()
        # Even without a batch: a group that found no blocks may have given up its own.
        self.grant_blocks()
        return updates

    def _step(self) -> list[SequenceUpdate]:
        begin = self._clock()
        self._propose()
        start = self._clock()
        self.settle()
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
        num_decoding = sum(s.num_scheduled_tokens == s.num_drawn for s in schedule.sequences)
        logits, prompt_logits = self._run(schedule.sequences)
        start = self._clock()
        self._score_prompts(schedule.sequences, prompt_logits)
        updates = self._advance(schedule.sequences)
        drawn = self._drawings(schedule.sequences)
        draw(drawn, logits, self.model.eos_token_ids, self._status_after_token)
        sampled = self._clock()
        updates += self._search(schedule.sequences, logits)
        updates += [self._settle(each) for each in drawn]
        end = self._clock()
        self.step_seconds.sample = sampled - start
        self.step_seconds.process = end - sampled
        if self.speculator is not None and num_decoding == len(schedule.sequences):
            num_drawn = sum(len(each.tokens) for each in drawn)
            self.speculator.stepped(num_tokens, num_drawn, self.step_seconds.forward, end - begin)
        return updates

    def _propose(self) -> None:
        """Guess the next tokens of the sequences that decode; a search's beams do not guess."""
        if self.speculator is None:
            return
        wanted = []
        for group in self.scheduler.running:
            group.drop_drafts()
            is_drawing = group.prompt.draws_tokens and not group.prompt.stops_after_prefill
            if group.beam is not None or not is_drawing or not (group.is_forked or group.params.n == 1):
                continue
            if group.params.kv_budget_tokens is not None:  # what it gives back depends on each token
                continue
            wanted += [
                Wanted(sequence, num_wanted)
                for sequence in group.sequences
                if sequence.num_tokens == sequence.num_computed_tokens + 1
                and (num_wanted := self._max_tokens_left(sequence) - 1) > 0
            ]
        self.speculator.propose(wanted)

    def _move_blocks(self, schedule: Schedule) -> None:
        if not schedule.moves_blocks:
            return
        start = self._clock()
        self.runner.move_blocks(schedule)
        if self.tiers is not None:
            self.tiers.promote(schedule.promotions)
        num_swapped = len(schedule.swap_out) + len(schedule.swap_in)
        self._swap_cost.swapped(num_swapped, self._clock() - start)
        self.scheduler.moved(schedule)

    def _run(self, scheduled: list[ScheduledSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits that tokens are drawn from, and those that prompt logprobs need."""
        start = self._clock()
        arguments = self.runner.prepare(scheduled)
        prepared = self._clock()
        logits = self.runner.forward(arguments)
        computed = self._clock()
        self.step_seconds.prepare = prepared - start
        self.step_seconds.forward = computed - prepared
        self.num_step_tokens = sum(s.num_scheduled_tokens for s in scheduled)
        self._swap_cost.computed(self.num_step_tokens, computed - prepared)
        num_drawn = sum(s.num_drawn for s in scheduled)
        return logits[:num_drawn], logits[num_drawn:]

    def _score_prompts(self, scheduled: list[ScheduledSequence], logits: torch.Tensor) -> None:
        """Note the logprobs of the prompt tokens that follow those of this step, where they are wanted."""
        start = 0
        for sequence, num_tokens in scheduled:
            if positions := sequence.positions_to_score(num_tokens):
                rows = logits[start : start + len(positions)]
                following = sequence.token_ids[positions.start + 1 : positions.stop + 1]
                num_top = sequence.params.num_prompt_logprobs or 0
                sequence.prompt_logprobs += rank_tokens(rows.float(), following, num_top)
                start += len(positions)

    def _advance(self, scheduled: list[ScheduledSequence]) -> list[SequenceUpdate]:
        """Note what has been computed, and report prompts that are not done or done without drawing."""
        updates = []
        for sequence, num_tokens in scheduled:
            sequence.num_computed_tokens += num_tokens - len(sequence.draft_token_ids)
            self.tables.seal(sequence)
            self.tables.drop_unseen(sequence, sequence.num_computed_tokens)
            self._evict(sequence)
            is_done = sequence.num_computed_tokens == sequence.num_tokens
            if is_done and sequence.draws_tokens:
                continue
            if is_done:
                self._finish(sequence, SequenceStatus.FINISHED_HANDED_OVER)
            updates.append(SequenceUpdate(sequence, sequence.num_computed_tokens, [], sequence.status))
        return updates

    def _evict(self, sequence: Sequence) -> None:
        """Give back what is beyond a sequence's KV budget."""
        if places := self._eviction.choose(sequence):
            self.tables.drop(sequence, places)

    def _drawings(self, scheduled: list[ScheduledSequence]) -> list[Drawing]:
        """Return the sequences that were computed to their end; fork the samples first."""
        drawings = []
        for (sequence, _), row in zip(scheduled, first_rows(scheduled), strict=True):
            group = self.groups[sequence.request_id]
            if sequence.num_computed_tokens < sequence.num_tokens or not sequence.draws_tokens or group.beam:
                continue
            # The prompt's last row gives the first token of every sample.
            sequences = [sequence] if group.is_forked else group.fork_samples(self.pool)
            drawings += [Drawing(each, row, []) for each in sequences]
        return drawings

    def _settle(self, drawn: Drawing) -> SequenceUpdate:
        """Keep what right guesses computed, drop the rest, and end the sequence if it has ended."""
        sequence = drawn.sequence
        num_computed, num_accepted = sequence.num_computed_tokens, 0
        if sequence.draft_token_ids and self.speculator is not None:
            num_accepted = drawn.num_accepted_tokens
            self.speculator.verified(sequence, len(sequence.draft_token_ids), num_accepted)
            sequence.num_computed_tokens += num_accepted
            sequence.draft_token_ids = []
            self.tables.seal(sequence)
            self.tables.trim(sequence)
        if sequence.status.is_finished:
            self._finish(sequence, sequence.status)
        return SequenceUpdate(
            sequence, num_computed, drawn.tokens, sequence.status, num_accepted_tokens=num_accepted
        )

    def _search(self, scheduled: list[ScheduledSequence], logits: torch.Tensor) -> list[SequenceUpdate]:
        """Advance each beam search whose beams have all been computed."""
        rows = {id(s.sequence): row for s, row in zip(scheduled, first_rows(scheduled), strict=True)}
        names = dict.fromkeys(sequence.request_id for sequence, _ in scheduled)
        updates = []
        for group in (self.groups[name] for name in names if name in self.groups):
            beams = group.sequences
            if group.beam is None or any(s.num_computed_tokens < s.num_tokens for s in beams):
                continue
            outputs = [beam.token_ids[beam.num_prompt_tokens :] for beam in beams]
            # As in transformers: the rules change logprobs, which then no longer sum to one.
            logprobs = torch.log_softmax(logits[[rows[id(beam)] for beam in beams]].float(), dim=-1)
            logprobs = process_logits(logprobs, beams, self.model.eos_token_ids)
            extensions = group.beam.advance(logprobs, outputs)
            if group.beam.is_done:
                updates += self._end_search(group, group.beam.hypotheses)
                continue
            group.extend_beams(extensions, self.pool)
        return updates

    def _end_search(self, group: SequenceGroup, hypotheses: list[Hypothesis]) -> list[SequenceUpdate]:
        """End a search: its answers come all at once, the best first."""
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
        """Raise AssertionError unless each used block, here and on the host, is a live group's or pinned."""
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
    """Return the most tokens of a sequence: the model's positions, what the pool holds, or less if told so.

    Of a model whose layers all forget, the pool need not hold all.
    """
    capacity = memory.num_blocks * memory.shape.block_size if model.window is None else UNLIMITED
    return min(model.max_position_embeddings, capacity, max_model_len or UNLIMITED)


def num_transferred_tokens(prompt: Sequence) -> int:
    """Return how many of a request's prompt tokens are computed elsewhere.

    All, if one sequence draws its first token there too. Several need the last token's logits where they are.
    """
    return prompt.num_tokens if prompt.params.num_sequences == 1 else prompt.num_tokens - 1
