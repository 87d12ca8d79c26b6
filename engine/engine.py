"""The engine: it schedules a batch, runs the model on it and processes the result, step after step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch

from quire.engine.kv_cache.block_pins import BlockPins
from quire.engine.kv_cache.block_pool import BlockListener
from quire.engine.kv_cache.disk_cache import DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.swap_space import SwapSpace
from quire.engine.kv_cache.tiers import CacheTiers
from quire.engine.kv_cache.window_pool import WindowPool, pool_of
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.runner.step_clock import StepClock
from quire.engine.runner.thread_count import ThreadCount
from quire.engine.scheduling.fair_blocks import FairBlocks
from quire.engine.scheduling.first_blocks import FirstBlocks
from quire.engine.scheduling.group_queues import GroupQueues
from quire.engine.scheduling.preemption import Preemption
from quire.engine.scheduling.request_checks import RequestChecks
from quire.engine.scheduling.requests import Requests
from quire.engine.scheduling.rests import Rests
from quire.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from quire.engine.scheduling.sequence_group import SequenceGroup
from quire.engine.scheduling.step_results import StepResults
from quire.engine.scheduling.swapping import SwapCost, Swapping
from quire.engine.scheduling.transfers import Transfers
from quire.engine.sequences.block_tables import BlockTables
from quire.engine.sequences.block_tokens import Describe
from quire.engine.sequences.paged_eviction import PagedEviction
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import (
    ScheduledSequence,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)
from quire.engine.sequences.stop_rules import StopRules
from quire.engine.sequences.window_tables import WindowTables
from quire.engine.speculation.speculator import Speculator, draft_requests
from quire.engine.weights.loader import UNLIMITED, LoadedModel


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts that not every engine has.

    Attributes:
        listener: is notified when blocks become cached and when they are evicted.
        describe: is told the tokens of cached blocks; ``listener`` is then notified of their removal.
        swap_memory: host blocks for preempted groups; None means that there are none.
        host_cache: keeps the blocks that the pool evicts; None means that they are discarded.
        disk_cache: keeps the blocks that the host cache evicts; needs a host cache.
        speculator: proposes draft tokens, which a step then verifies; None means one token per step.
        eviction: chooses the blocks that requests with a KV budget free; None means the default choice.
        runner: runs the model over the engine's blocks; None means a ``ModelRunner`` without changes.
        clock: returns seconds, for the times of requests and steps.
    """

    listener: BlockListener | None = None
    describe: Describe | None = None
    swap_memory: KvMemory | None = None
    host_cache: HostCache | None = None
    disk_cache: DiskCache | None = None
    speculator: Speculator | None = None
    eviction: PagedEviction | None = None
    runner: ModelRunner | None = None
    clock: Callable[[], float] = perf_counter

    def make_tiers(self, memory: KvMemory) -> CacheTiers | None:
        """Return the cache tiers below a pool with the given memory; None without a host cache."""
        if self.host_cache is None:
            return None
        return CacheTiers(memory, self.host_cache, self.disk_cache, self.listener)


class StepLogits(NamedTuple):
    """The logits of a step, and hidden states.

    Attributes:
        to_sample: ``[num_rows, vocab_size]``, with ``num_sampled_rows`` rows for each sequence.
        of_prompts: ``[num_scored, vocab_size]``, for prompt logprobs; None if there are none.
        hidden: ``[num_hidden, hidden_size]``, for embeddings; None if there are none.
    """

    to_sample: torch.Tensor
    of_prompts: torch.Tensor | None
    hidden: torch.Tensor | None


class Engine:
    """Runs sequences over paged KV blocks. It is not thread-safe: one thread owns it.

    Its parts are public, so callers use them directly, as in ``engine.pins.unpin(name)``. The engine itself
    only has the operations that involve several parts. Requests whose prompts another worker computes are in
    ``transfers``. After any call that may free blocks, call ``transfers.grant_blocks``; ``step`` does so
    itself.

    Args:
        model: the model.
        memory: the model's KV blocks.
        config: the limits of a step.
        max_model_len: most tokens of a sequence; None means what the model and the pool allow.
        parts: the optional parts; None means that there are none.
    """

    def __init__(
        self,
        model: LoadedModel,
        memory: KvMemory,
        config: SchedulerConfig,
        max_model_len: int | None = None,
        parts: EngineParts | None = None,
    ) -> None:
        parts = parts or EngineParts()
        self.model = model
        self.memory = memory
        self.max_model_len = longest_sequence(model, memory, max_model_len)
        """Most tokens of a sequence, prompt and output."""
        self.tiers = parts.make_tiers(memory)
        self.pool = pool_of(memory, parts.listener, self.tiers)
        self.pins = BlockPins(self.pool, parts.clock)
        self.swap_space = SwapSpace(parts.swap_memory.num_blocks if parts.swap_memory else 0)
        ledger: type[BlockTables] = WindowTables if isinstance(self.pool, WindowPool) else BlockTables
        self.tables = tables = ledger(
            self.pool,
            config.block_size,
            memory.shape.window or model.window,
            config.max_num_batched_tokens,
            self.tiers,
            parts.describe,
            has_partial_hits=model.heads.states is None,
        )
        self.queues = queues = GroupQueues(self.pool, parts.clock)
        self._swap_cost = SwapCost(memory.shape.block_bytes)
        swapping = Swapping(queues, tables, self.swap_space)
        prefers_swap = self._swap_cost.prefers_swap
        self.preemption = Preemption(queues, tables, swapping, prefers_swap)
        first_blocks = FirstBlocks(queues, tables, self.tiers)
        fair_blocks = FairBlocks(queues, tables)
        self.scheduler = Scheduler(config, queues, tables, self.preemption, first_blocks, fair_blocks)
        self.runner = parts.runner or ModelRunner(model, memory, parts.swap_memory)
        self.speculator = parts.speculator
        self._stop_rules = rules = StopRules(model.eos_token_ids, self.max_model_len)
        limits = (config.max_num_seqs, self.max_model_len)
        checks = RequestChecks(model.has_windows, tables, *limits, model.can_rank_blocks)
        self.requests = Requests(checks, rules, queues, tables, self.swap_space, parts.clock)
        self.rests = Rests(queues, self.requests.groups, parts.clock)
        eviction = parts.eviction or PagedEviction(memory)
        self.transfers = Transfers(self.requests, queues, fair_blocks, tables, eviction, rules)
        record_drafts = None if self.speculator is None else self.speculator.record_verification
        self._results = StepResults(self.requests, tables, eviction, rules, record_drafts)
        self._on_schedule: Callable[[Schedule], None] | None = None
        self.num_stepped = 0
        """Sequences that the last step computed.

        Each beam counts, although a beam search gives only one update.
        """
        self.num_step_tokens = 0
        """Tokens that the last step computed."""
        self.is_blocked = False
        """Whether only an event from outside can let the next step compute or move anything."""
        self._clock = parts.clock
        self.step_clock = StepClock(parts.clock)
        self._threads = ThreadCount()

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """The requests by id."""
        return self.requests.groups

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that finished prefills and pins hold until they are released."""
        sequences = (s for group in self.groups.values() for s in group.sequences)
        return self.pins.num_blocks + sum(len(s.held_blocks) for s in sequences if s.status.is_finished)

    @property
    def oldest_pin_seconds(self) -> float:
        """Seconds for which the oldest of ``num_pinned_blocks`` has been held; 0 if there are none."""
        sequences = (s for group in self.groups.values() for s in group.sequences)
        begun_at = [s.finished_at for s in sequences if s.status.is_finished and s.block_table]
        if self.pins.oldest_begun_at is not None:
            begun_at.append(self.pins.oldest_begun_at)
        return self._clock() - min(begun_at) if begun_at else 0.0

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return self.queues.is_idle

    # --- requests -----------------------------------------------------------------------------------------

    def add_request(self, prompt: Sequence) -> None:
        """Queue a request whose prompt this worker computes.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        self.requests.queue_group(self.requests.register(prompt))

    def abort(self, attempt_id: str) -> None:
        """End a request and free its blocks; do nothing if it is unknown or finished."""
        group = self.groups.get(attempt_id)
        if group is not None:
            self.requests.discard_group(group, SequenceStatus.FINISHED_ABORTED)

    def stop_sequence(self, sequence: Sequence) -> None:
        """End one sequence that a step has just advanced; the other sequences of its request continue."""
        if not sequence.status.is_finished:
            self.requests.finish_sequence(sequence, SequenceStatus.FINISHED_STOPPED)

    # --- the prefix cache ---------------------------------------------------------------------------------

    def prefetch(self, block_hashes: Items[bytes], on_done: Callable[[], None]) -> bool:
        """Read a chain's blocks that are on disk into host memory; return whether none has to be read.

        If some have to be, ``on_done`` is called when they are there.
        """
        return self.tiers is None or self.tiers.prefetch(block_hashes, on_done).is_done

    def apply_disk_results(self) -> None:
        """Apply the disk reads and writes that have ended since the last call."""
        if self.tiers is not None:
            self.tiers.apply_disk_results()

    def subscribe_to_disk_reads(self, on_read: Callable[[], None]) -> None:
        """Call ``on_read`` in another thread after each disk read; see ``apply_disk_results``."""
        if self.tiers is not None and self.tiers.disk is not None:
            self.tiers.disk.subscribe(on_read)

    def subscribe_to_schedules(self, on_schedule: Callable[[Schedule], None]) -> None:
        """Call ``on_schedule`` in each step, before the blocks are moved and the tokens computed."""
        self._on_schedule = on_schedule

    def pin(self, name: str, block_hashes: Items[bytes]) -> list[int]:
        """Pin the leading blocks that are in the pool or in host memory; return their ids."""
        if self.tiers is not None:
            self.tiers.promote_into(self.pool, block_hashes)
        return self.pins.pin(name, block_hashes)

    def clear_cache(self) -> int:
        """Drop the cached blocks that no request uses, in all tiers; return how many were dropped."""
        num_cached = self.pool.counts.cached
        self.pool.clear_cache()
        return num_cached + (self.tiers.clear() if self.tiers is not None else 0)

    # --- one step -----------------------------------------------------------------------------------------

    def step(self) -> list[SequenceUpdate]:
        """Compute one batch; return an update for each of its sequences, and one for all unfinished beams."""
        with self._threads.of_step():
            return self._step_or_end_deadlock()

    def _step_or_end_deadlock(self) -> list[SequenceUpdate]:
        updates = self._step()
        # This is needed even without a batch: blocks may be free now because a group that did not fit was
        # preempted.
        self.transfers.grant_blocks()
        while self.is_blocked and self.transfers.end_deadlocked():
            updates = self._step()
            self.transfers.grant_blocks()
        return updates

    def _step(self) -> list[SequenceUpdate]:
        self.step_clock.start()
        schedule = self._schedule()
        if not schedule.sequences:
            return []
        logits = self._run(schedule.sequences)
        return self._process(schedule.sequences, logits)

    def _schedule(self) -> Schedule:
        """Propose draft tokens, choose the tokens of the step, and move the blocks that it needs."""
        self._propose_drafts()
        self.step_clock.lap("propose")
        started_at = self.step_clock.lap_began_at
        self.apply_disk_results()
        schedule = self.scheduler.schedule()
        self.step_clock.lap("schedule")
        self.num_stepped = len(schedule.sequences)
        for prompt in schedule.admitted:
            prompt.started_at = prompt.started_at or started_at
        if self._on_schedule is not None:
            self._on_schedule(schedule)
        # What a step without a batch has moved may be what a group waits for.
        self.is_blocked = not schedule.sequences and not schedule.moves_blocks
        if schedule.moves_blocks:
            self._move_blocks(schedule)
        self.swap_space.end_step()
        self.pool.free(schedule.pinned)
        return schedule

    def _propose_drafts(self) -> None:
        if self.speculator is not None:
            for group in self.queues.running:
                group.drop_drafts()
            self.speculator.propose(draft_requests(self.queues.running, self._stop_rules))

    def _move_blocks(self, schedule: Schedule) -> None:
        self.runner.move_blocks(schedule)
        if self.tiers is not None:
            self.tiers.promote(schedule.promotions)
        num_swapped = schedule.num_swapped_blocks // self.memory.shape.num_frames
        self._swap_cost.record_swap(num_swapped, self.step_clock.lap())
        for sequence, num_full in schedule.promoted:
            self.tables.seal_blocks(sequence, num_full)

    def _run(self, scheduled: list[ScheduledSequence]) -> StepLogits:
        """Run the model on the scheduled tokens."""
        arguments = self.runner.prepare(scheduled)
        self.step_clock.lap("prepare")
        logits = self.runner.forward(arguments)
        seconds = self.step_clock.lap("forward")
        self.num_step_tokens = sum([num_tokens for _, num_tokens in scheduled])
        self._swap_cost.record_forward(self.num_step_tokens, seconds)
        num_rows = len(scheduled)
        if self.speculator is not None:
            num_rows += sum(len(sequence.draft_token_ids) for sequence, _ in scheduled)
        hidden = self.runner.hidden_states(arguments)
        if logits.shape[0] == num_rows:
            return StepLogits(logits, None, hidden)
        return StepLogits(logits[:num_rows], logits[num_rows:], hidden)

    def _process(self, scheduled: list[ScheduledSequence], logits: StepLogits) -> list[SequenceUpdate]:
        """Sample tokens, advance beam searches, and end the sequences that have finished or failed."""
        results = self._results
        updates = results.record_computed_tokens(scheduled, logits.of_prompts, logits.hidden)
        sampled = results.sample(logits.to_sample)
        self.step_clock.lap("sample")
        updates += results.advance_beam_searches(scheduled, logits.to_sample)
        updates += results.end_sampled(sampled)
        updates = results.end_failed_requests(updates)
        self.step_clock.lap("process")
        return updates

    def check_conservation(self) -> None:
        """Raise AssertionError unless each used block, in the pool and on the host, has a group or pin."""
        self.pool.check_conservation()
        if self.tiers is not None:
            self.tiers.check_conservation(self.pool)
        groups = self.groups.values()
        held = {block_id for group in groups for s in group.sequences for block_id in s.held_blocks}
        held |= self.pins.block_ids
        assert len(held) == self.pool.num_in_use, f"{self.pool.num_in_use - len(held)} blocks have leaked"
        swapped = [host_id for group in groups if group.swapped for host_id in group.swapped.host_ids]
        num_used = self.swap_space.num_blocks - self.swap_space.num_free
        assert len(swapped) == len(set(swapped)) == num_used, "host blocks have leaked"


def longest_sequence(model: LoadedModel, memory: KvMemory, max_model_len: int | None = None) -> int:
    """Return the most tokens of a sequence that the model, the pool and ``max_model_len`` allow.

    With a sliding window in every layer, the pool need not hold a whole sequence.
    """
    capacity = memory.shape.most_tokens(memory.num_blocks) if model.window is None else UNLIMITED
    return min(model.max_position_embeddings, capacity, max_model_len or UNLIMITED)
