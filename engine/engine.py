"""The engine: schedule, run, process, one step after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from quire.engine.block_pool import BlockListener, BlockPool, NoFreeBlocksError
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.model_runner import ModelRunner
from quire.engine.sampler import SampledTokens, sample
from quire.engine.scheduler import ScheduledSequence, Scheduler, SchedulerConfig
from quire.engine.sequence import HashBlock, Sequence, SequenceStatus, SequenceUpdate


class RequestTooLongError(ValueError):
    """A request can never fit into this worker; the message names the limit."""


@dataclass(slots=True)
class StepSeconds:
    """Where the time of the last step went."""

    schedule: float = 0.0
    prepare: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    process: float = 0.0


class Engine:
    """Runs sequences over paged KV blocks. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: LoadedModel,
        memory: KvMemory,
        config: SchedulerConfig,
        hash_block: HashBlock,
        listener: BlockListener | None = None,
        max_model_len: int | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.model = model
        self.memory = memory
        self.pool = BlockPool(memory.num_blocks, listener)
        self.scheduler = Scheduler(config, self.pool, hash_block)
        self.runner = ModelRunner(model, memory)
        self.sequences: dict[str, Sequence] = {}
        self.step_seconds = StepSeconds()
        self._clock = clock
        capacity = memory.num_blocks * memory.shape.block_size
        self.max_model_len = min(model.max_position_embeddings, capacity, max_model_len or capacity)
        """Most tokens of a sequence: the model's positions, what the pool holds, or less if told so."""
        self._waiting_for_blocks: dict[str, Callable[[], None]] = {}

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that finished prefills hold until they are released."""
        return sum(len(s.block_table) for s in self.sequences.values() if s.status.is_finished)

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not self.scheduler.running and not self.scheduler.waiting

    # --- the life of a sequence ---------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Take a sequence to compute here.

        Raises:
            RequestTooLongError: the sequence can never fit.
        """
        self._register(sequence)
        self.scheduler.add(sequence)

    def accept(self, sequence: Sequence) -> int:
        """Take a sequence whose prompt is computed elsewhere; return how many of its blocks are held here.

        The held blocks are referenced until the sequence ends.

        Raises:
            RequestTooLongError: the sequence can never fit.
        """
        self._register(sequence)
        self.scheduler.stamp_arrival(sequence)
        sequence.status = SequenceStatus.TRANSFERRING
        self.scheduler.take_cached_prefix(sequence, max_tokens=sequence.num_tokens)
        return len(sequence.block_table)

    def _register(self, sequence: Sequence) -> None:
        if sequence.num_tokens >= self.max_model_len:
            raise RequestTooLongError(
                f"{sequence.num_tokens} prompt tokens; this worker takes at most {self.max_model_len - 1}"
            )
        if sequence.request_id in self.sequences:
            raise ValueError(f"request {sequence.request_id} is already here")
        self.sequences[sequence.request_id] = sequence

    def reserve(self, request_id: str, on_reserved: Callable[[], None]) -> None:
        """Call back, at once or later, when an accepted sequence has blocks for its whole prompt.

        All or nothing and first come first served, so no two transfers can each wait for the other's blocks.

        Raises:
            KeyError: the sequence has ended.
        """
        self.sequences[request_id]
        self._waiting_for_blocks[request_id] = on_reserved
        self._grant_blocks()

    def _grant_blocks(self) -> None:
        for request_id, on_reserved in list(self._waiting_for_blocks.items()):
            try:
                self.scheduler.reserve(self.sequences[request_id])
            except NoFreeBlocksError:
                return
            del self._waiting_for_blocks[request_id]
            on_reserved()

    def admit(self, request_id: str, first_token_id: int) -> SequenceUpdate:
        """Start decoding an accepted sequence whose prompt's blocks have all been written."""
        sequence = self.sequences[request_id]
        sequence.num_computed_tokens = sequence.num_tokens
        self.scheduler.seal(sequence)
        sequence.token_ids.append(first_token_id)
        status = self._status_after_token(sequence)
        if status.is_finished:
            self._finish(sequence, status)
        else:
            self.scheduler.add(sequence)
        return SequenceUpdate(sequence, sequence.num_computed_tokens, None, None, sequence.status)

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; unknown and finished ones are no error."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._waiting_for_blocks.pop(request_id, None)
            self._finish(sequence, SequenceStatus.FINISHED_ABORTED)

    release = abort
    """Give back the blocks of a finished prefill: the same as ending it."""

    def _finish(self, sequence: Sequence, status: SequenceStatus) -> None:
        self.scheduler.finish(sequence, status)
        if not sequence.block_table:
            del self.sequences[sequence.request_id]
        self._grant_blocks()

    # --- one step -----------------------------------------------------------------------------------------

    def step(self) -> list[SequenceUpdate]:
        """Compute one batch and return what it did for each sequence in it."""
        start = self._clock()
        scheduled = self.scheduler.schedule()
        self.step_seconds.schedule = self._clock() - start
        return self._process(scheduled, self._run(scheduled)) if scheduled else []

    def _run(self, scheduled: list[ScheduledSequence]) -> SampledTokens:
        start = self._clock()
        arguments = self.runner.prepare(scheduled)
        prepared = self._clock()
        logits = self.runner.forward(arguments)
        computed = self._clock()
        sampled = sample(logits, [s.sequence for s in scheduled], self.model.eos_token_ids)
        self.step_seconds.prepare = prepared - start
        self.step_seconds.forward = computed - prepared
        self.step_seconds.sample = self._clock() - computed
        return sampled

    def _process(self, scheduled: list[ScheduledSequence], sampled: SampledTokens) -> list[SequenceUpdate]:
        start = self._clock()
        updates = []
        for row, (sequence, num_tokens) in enumerate(scheduled):
            sequence.num_computed_tokens += num_tokens
            self.scheduler.seal(sequence)
            num_computed = sequence.num_computed_tokens
            if num_computed < sequence.num_tokens:
                updates.append(SequenceUpdate(sequence, num_computed, None, None, sequence.status))
                continue
            token_id = sampled.token_ids[row]
            sequence.token_ids.append(token_id)
            status = self._status_after_token(sequence)
            if status.is_finished:
                self._finish(sequence, status)
            else:
                sequence.status = status
            updates.append(SequenceUpdate(sequence, num_computed, token_id, sampled.logprobs[row], status))
        self._grant_blocks()
        self.step_seconds.process = self._clock() - start
        return updates

    def _status_after_token(self, sequence: Sequence) -> SequenceStatus:
        params, token_id = sequence.params, sequence.token_ids[-1]
        if sequence.num_output_tokens >= params.min_tokens:
            is_eos = token_id in self.model.eos_token_ids and not params.ignore_eos
            if is_eos or token_id in params.stop_token_ids:
                return SequenceStatus.FINISHED_STOPPED
        if sequence.num_output_tokens >= params.max_tokens or sequence.num_tokens >= self.max_model_len:
            return SequenceStatus.FINISHED_LENGTH
        if sequence.stops_after_prefill:
            return SequenceStatus.FINISHED_HANDED_OVER
        return SequenceStatus.DECODING

    def check_conservation(self) -> None:
        """Raise AssertionError unless every used block belongs to a live sequence."""
        self.pool.check_conservation()
        held = {block_id for s in self.sequences.values() for block_id in s.block_table}
        assert len(held) == self.pool.counts.used, f"{self.pool.counts.used - len(held)} blocks have leaked"
