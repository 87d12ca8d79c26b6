"""Measures the load that requests cause, as independently as possible of the workers' roles."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from typing import NamedTuple

WINDOW_SECONDS = 3.0
"""Least period over which the demand is measured."""
WINDOW_PROMPTS = 20
MAX_WINDOW_SECONDS = 30.0
"""With few requests the period is longer, until it has this many prompts or is this long."""
FIRST_DOUBLING = 16.0
"""Assumed number of sequences that doubles the time of a decode step, until it has been measured."""
STEP_MEMORY_SECONDS = 300.0
"""Time after which a measurement of the step time has a third of its weight."""
MAX_LOST_SHARE = 0.9
"""Largest share of a decode worker's time that is attributed to the prompts that it computes."""


class RoleState(NamedTuple):
    """A worker that accepts requests, and the router's work in flight there.

    Attributes:
        pending_seconds: expected time to compute the prompts in its queue.
        resident_tokens: tokens of sequences whose blocks it keeps.
        capacity_tokens: tokens that fit in its pool.
    """

    worker_id: str
    role: str
    pending_seconds: float = 0.0
    resident_tokens: int = 0
    capacity_tokens: int = 1


class Totals(NamedTuple):
    """Totals over all requests so far; each value only grows.

    Attributes:
        num_prompts: prompts that were placed.
        remote_seconds: expected compute time of the prompts that were placed on prefill workers.
        local_seconds: expected compute time of the prompts that decode workers compute themselves.
        num_tokens: tokens after the first of each answer.
        token_seconds: time to generate these tokens, summed over the answers.
    """

    num_prompts: int = 0
    remote_seconds: float = 0.0
    local_seconds: float = 0.0
    num_tokens: float = 0
    token_seconds: float = 0.0

    def since(self, earlier: Totals) -> Totals:
        """Return the demand since an earlier reading."""
        return Totals(*map(sub, self, earlier))


class Demand(NamedTuple):
    """The demand of the requests of the last seconds.

    Attributes:
        prompt_seconds: mean compute time of a prompt.
        prompt_load: compute time of prompts per second, for prefill workers if there are any.
        local_load: compute time per second of prompts that decode workers compute despite prefill workers.
        backlog_seconds: compute time of the waiting prompts.
        tokens_per_second: tokens after the first of each answer.
        answer_tokens: mean number of such tokens in an answer.
        step_base: time of a decode step, without the time that depends on its number of sequences.
        step_slope: additional time of a step for each sequence.
        resident_tokens: tokens of the sequences on decode workers.
        capacity_tokens: tokens that fit in the pool of one worker.
    """

    prompt_seconds: float
    prompt_load: float
    local_load: float
    backlog_seconds: float
    tokens_per_second: float
    answer_tokens: float
    step_base: float
    step_slope: float
    resident_tokens: int
    capacity_tokens: float


@dataclass(slots=True)
class StepTimes:
    """Learns a step's time as ``base + slope * sequences``, by least squares with decaying weights.

    A weak prior determines the slope as long as the number of sequences has not varied.
    """

    weight: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0
    squares: float = 0.0
    products: float = 0.0

    def add(self, sequences: float, seconds: float, decay: float) -> None:
        """Record the mean time of a step with ``sequences``; older records keep the share ``decay``."""
        self.weight = decay * self.weight + 1
        self.sequences = decay * self.sequences + sequences
        self.seconds = decay * self.seconds + seconds
        self.squares = decay * self.squares + sequences * sequences
        self.products = decay * self.products + sequences * seconds

    def line(self) -> tuple[float, float]:
        """Return base and slope, both at least 0."""
        if not self.weight:
            return 0.0, 0.0
        sequences, seconds = self.sequences / self.weight, self.seconds / self.weight
        variance = max(0.0, self.squares / self.weight - sequences**2)
        covariance = self.products / self.weight - sequences * seconds
        prior = seconds / (FIRST_DOUBLING + sequences)
        slope = (covariance + prior) / (variance + 1)
        slope = min(max(0.0, slope), seconds / sequences if sequences else 0.0)
        return max(0.0, seconds - slope * sequences), slope


class DemandMeter:
    """Measures the demand from readings of the totals, one about every second."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Totals]] = deque()
        self._steps = StepTimes()

    def measure(self, workers: Sequence[RoleState], totals: Totals, now: float) -> Demand:
        """Return the demand of the last seconds.

        Args:
            workers: the workers that accept requests.
            totals: a new reading.
            now: time of the reading, in seconds.
        """
        decode = [worker for worker in workers if worker.role == "decode"]
        has_prefill = len(decode) < len(workers)
        self._learn_step(totals, now, len(decode))
        self._readings.append((now, totals))
        while len(self._readings) > 2 and _is_enough(self._readings[1], totals, now):
            self._readings.popleft()
        then, earlier = self._readings[0]
        seconds, new = max(now - then, 1e-9), totals.since(earlier)
        base, slope = self._steps.line()
        prompt_seconds = new.remote_seconds + new.local_seconds
        capacity_tokens = sum(worker.capacity_tokens for worker in workers)
        return Demand(
            prompt_seconds=prompt_seconds / max(1, new.num_prompts),
            prompt_load=(new.remote_seconds if has_prefill else prompt_seconds) / seconds,
            local_load=new.local_seconds / seconds if has_prefill else 0.0,
            backlog_seconds=sum(worker.pending_seconds for worker in workers),
            tokens_per_second=new.num_tokens / seconds,
            answer_tokens=max(1.0, new.num_tokens / max(1, new.num_prompts)),
            step_base=base,
            step_slope=slope,
            resident_tokens=sum(worker.resident_tokens for worker in decode),
            capacity_tokens=max(1.0, capacity_tokens / max(1, len(workers))),
        )

    def _learn_step(self, totals: Totals, now: float, num_decode: int) -> None:
        """Learn the step time from the change since the last reading."""
        if not self._readings or not num_decode:
            return
        then, earlier = self._readings[-1]
        seconds, new = now - then, totals.since(earlier)
        if seconds <= 0 or new.num_tokens <= 0:
            return
        lost = min(MAX_LOST_SHARE, new.local_seconds / seconds / num_decode)
        step_seconds = (1 - lost) * new.token_seconds / new.num_tokens
        decay = max(0.0, 1 - seconds / STEP_MEMORY_SECONDS)
        self._steps.add(new.token_seconds / seconds / num_decode, step_seconds, decay)


def _is_enough(reading: tuple[float, Totals], totals: Totals, now: float) -> bool:
    """Return whether the demand can be measured from this reading on."""
    then, earlier = reading
    age, num_prompts = now - then, totals.num_prompts - earlier.num_prompts
    return age >= MAX_WINDOW_SECONDS or (age >= WINDOW_SECONDS and num_prompts >= WINDOW_PROMPTS)
