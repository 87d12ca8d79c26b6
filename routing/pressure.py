"""Predicts how long requests take with a number of prefill and decode workers, as shares of their targets."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from quire.routing.demand import Demand

TAIL = 2.0
"""Requests at the 90th percentile wait about this many times the mean, or deviate from it by this many
standard deviations."""
MAX_LOAD = 0.95
"""Load of a queue beyond which its wait is extended linearly, so that overloaded splits can be compared."""
DRAIN_SECONDS = 10.0
"""Time in which the waiting prompts should be computed in addition to new ones."""


class Targets(NamedTuple):
    """Targets for the time to the first token, and for the mean time of each further token, in seconds."""

    ttft_seconds: float
    tpot_seconds: float


class Pressure(NamedTuple):
    """Predicted times as shares of their targets, and the share of decode workers' blocks in use."""

    ttft: float
    tpot: float
    room: float

    @property
    def worst(self) -> float:
        """The largest of the shares; above 1, requests miss their targets."""
        return max(self)

    @property
    def cause(self) -> str:
        """Name of the largest share."""
        return max(zip(self, self._fields, strict=True))[1]


def congestion(load: float) -> float:
    """Return ``load / (1 - load)``, the mean queue of a server, extended linearly beyond ``MAX_LOAD``."""
    if load <= MAX_LOAD:
        return load / (1 - load)
    return MAX_LOAD / (1 - MAX_LOAD) + (load - MAX_LOAD) / (1 - MAX_LOAD) ** 2


def predict(demand: Demand, targets: Targets, num_prefill: int, num_decode: int) -> Pressure:
    """Return the pressure of a split.

    Prompts wait as in a queue with one server for each worker that computes them. Without prefill workers
    these are the decode workers, and the time that they compute prompts is lost for their sequences. With x
    tokens per second and worker and a share f of lost time, a step of ``base + slope * x * TPOT`` seconds
    gives ``TPOT = base / (1 - f - slope * x)``. An answer of n tokens meets ``f * n * TPOT / s`` prompts of s
    seconds on average, and the square root of that more or less.

    Args:
        num_decode: number of decode workers, at least 1.
    """
    servers = num_prefill or num_decode
    prompt_load = demand.prompt_load + demand.backlog_seconds / DRAIN_SECONDS
    wait = TAIL * demand.prompt_seconds * congestion(prompt_load / servers) / servers
    ttft = demand.prompt_seconds + wait
    tpot = 0.0
    if demand.tokens_per_second:
        lost = (demand.local_load + (0.0 if num_prefill else prompt_load)) / num_decode
        decoding = demand.step_slope * demand.tokens_per_second / num_decode
        tpot = demand.step_base * (1 + congestion(lost + decoding))
        tpot += TAIL * sqrt(demand.prompt_seconds * lost * tpot / demand.answer_tokens)
    room = demand.resident_tokens / (num_decode * demand.capacity_tokens)
    return Pressure(ttft / targets.ttft_seconds, tpot / targets.tpot_seconds, room)
