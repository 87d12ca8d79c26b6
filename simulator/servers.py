"""Simulated workers: each has a queue of prompts, and a batch of sequences that decode together."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quire.routing.placement import Placement
from quire.simulator.block_cache import BlockCache
from quire.simulator.calibration import DECODE_PROMPT_TOKENS, Calibration
from quire.simulator.machine import Machine, Timeline
from quire.simulator.trace import TraceRequest


@dataclass(slots=True, eq=False)
class Job:
    """A request in the simulated cluster."""

    request: TraceRequest
    block_hashes: Sequence[bytes]
    """Hashes of the input's full blocks."""
    placement: Placement
    called_at: float = 0.0
    cached_tokens: int = 0
    pulled_bytes: float = 0.0
    pull_seconds: float = 0.0
    first_token_at: float = 0.0

    @property
    def num_further(self) -> int:
        """Tokens of the prompt beyond those with which decode steps were measured."""
        return max(0, self.request.input_tokens - DECODE_PROMPT_TOKENS)


@dataclass(slots=True, eq=False)
class Server:
    """A worker: its cache, its queue of prompts, its sequences, and the router's account of it.

    Prompts are computed one after another. In a real batch of several prompts, the last one takes as long as
    here.

    Sequences decode together, one token of each in a step. Progress is the number of tokens that a sequence
    would have had since the beginning. All sequences advance equally, so a sequence ends when the progress
    reaches its value at the sequence's start plus the sequence's tokens. Decoding stops while the worker
    computes prompts. All work takes as many times as long as the machine's processors are short.
    """

    worker_id: str
    role: str
    calibration: Calibration
    timeline: Timeline
    machine: Machine
    cache: BlockCache
    on_computed: Callable[[Job], None]
    on_finished: Callable[[Job], None]
    pending_tokens: int = 0
    resident_tokens: int = 0
    num_requests: int = 0
    busy_seconds: float = 0.0
    kept_blocks: int = 0
    num_tokens: float = 0.0
    """Number of tokens that its sequences have generated after their first ones."""
    token_seconds: float = 0.0
    """Time that these tokens took, summed over the sequences."""
    _queue: deque[Job] = field(default_factory=deque)
    _prompt: Job | None = None
    _prompt_seconds: float = 0.0
    """Time that the rest of the prompt takes a worker that is alone."""
    _progress: float = 0.0
    _updated_at: float = 0.0
    _active: list[tuple[float, int, Job]] = field(default_factory=list)
    _num_further: int = 0
    """Tokens of the active sequences' prompts beyond those of the calibration's."""
    _waiting: deque[Job] = field(default_factory=deque)
    _names: Any = field(default_factory=count)
    _version: int = 0

    def compute(self, job: Job) -> None:
        """Queue a prompt; ``on_computed`` is called when it is computed."""
        self._queue.append(job)
        if self._prompt is None:
            self._next()

    def decode(self, job: Job) -> None:
        """Queue a sequence whose prompt is computed; it starts as soon as there is room."""
        self.advance()
        self._waiting.append(job)
        self._admit()
        self._changed()

    def advance(self) -> None:
        """Update the progress of the prompt or the sequences to the present time."""
        elapsed, num_active = self.timeline.now - self._updated_at, len(self._active)
        self._updated_at = self.timeline.now
        self.token_seconds += elapsed * (num_active + len(self._waiting))
        if self._prompt is not None:
            self._prompt_seconds -= elapsed / self.machine.slowdown
            self.busy_seconds += elapsed
        elif num_active:
            num_steps = elapsed / self._step_seconds()
            self._progress += num_steps
            self.num_tokens += num_steps * num_active
            self.busy_seconds += elapsed

    def expect(self) -> None:
        """Schedule the end of the prompt or the next sequence; a change before then makes the event stale."""
        self._version += 1
        if self._prompt is not None:
            seconds = max(0.0, self._prompt_seconds) * self.machine.slowdown
            self.timeline.at(self.timeline.now + seconds, self._computed, self._version)
        elif self._active:
            seconds = max(0.0, self._active[0][0] - self._progress) * self._step_seconds()
            self.timeline.at(self.timeline.now + seconds, self._end, self._version)

    def num_blocks(self, job: Job) -> int:
        """Return the number of blocks that the whole sequence needs."""
        num_tokens = job.request.input_tokens + job.request.output_tokens
        return -(-num_tokens // self.calibration.block_tokens)

    def _step_seconds(self) -> float:
        return self.calibration.step_seconds(len(self._active), self._num_further) * self.machine.slowdown

    def _next(self) -> None:
        self.advance()
        self._prompt = job = self._queue.popleft() if self._queue else None
        if job is not None:
            num_tokens = job.request.input_tokens
            num_cached = self.cache.num_cached(job.block_hashes) * self.calibration.block_tokens
            job.cached_tokens = min(num_cached, num_tokens - 1)
            self._prompt_seconds = self.calibration.prefill_seconds(num_tokens, job.cached_tokens)
        self._changed()

    def _computed(self, version: int) -> None:
        job = self._prompt
        if version != self._version or job is None:
            return
        self.on_computed(job)
        self._next()

    def _changed(self) -> None:
        cal = self.calibration
        working = cal.decode_share if self._active else 0.0
        self.machine.want(self, cal.prefill_share if self._prompt is not None else working)
        self.expect()

    def _admit(self) -> None:
        while self._waiting:
            num_blocks = self.num_blocks(self._waiting[0])
            is_full = self.kept_blocks + num_blocks > self.calibration.num_blocks
            if self._active and (is_full or len(self._active) >= self.calibration.max_num_seqs):
                return
            job = self._waiting.popleft()
            self.kept_blocks += num_blocks
            end = self._progress + job.request.output_tokens - 1
            heapq.heappush(self._active, (end, next(self._names), job))
            self._num_further += job.num_further

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self.advance()
        end, _, job = heapq.heappop(self._active)
        # Rounding errors must not leave the progress below the end.
        self._progress = max(self._progress, end)
        self._num_further -= job.num_further
        self.kept_blocks -= self.num_blocks(job)
        self.on_finished(job)
        self._admit()
        self._changed()
