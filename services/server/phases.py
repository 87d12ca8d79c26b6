"""Measures the phases of a request: each is observed in a histogram, and is a span if the request is traced.

A phase is observed by the process in which it takes place: those up to ``TURN`` once per request, the
others once per attempt. The phases up to the first token add up to TTFT, except for the time in the network
and the event loops, and waits for a worker. The phases in ``HAND_OVER`` follow the first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Histogram

from quire.services.server.tracing import Span

PHASE_BUCKETS = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1, 2.5, 5, 10, 30, 60),
)


class Phase(StrEnum):
    """The phases of a request, in order; ``text`` describes a phase."""

    text: str

    def __new__(cls, value: str, text: str) -> Phase:
        phase = str.__new__(cls, value)
        phase._value_ = value
        phase.text = text
        return phase

    ADMIT = "admit", "From arrival until the limits of the router and the tenant admit the request."
    TOKENIZE = "tokenize", "From there until the prompt is tokenized and every parameter is checked."
    TURN = "turn", "The request waits for its turn among those of all tenants."
    LOOKUP = "lookup", "The index is asked which workers have the prompt's blocks."
    CHOOSE = "choose", "The policy chooses the workers."
    ACCEPT = "accept", "From the call to the decode worker until it has promised to take the blocks."
    PULL = "pull", "Blocks are copied from a peer before the rest is computed."
    PREFILL_QUEUE = (
        "prefill_queue",
        "From the scheduler's queue to the step that computes the first of the prompt's tokens.",
    )
    PREFILL_COMPUTE = (
        "prefill_compute",
        "From there until the last of them is computed and the first token is sampled.",
    )
    CREDIT_WAIT = (
        "credit_wait",
        "After the prompt is computed: the wait for room in the decode worker.",
    )
    TRANSFER = "transfer", "After the prompt is computed: the rest of the push, up to its acknowledgement."
    DECODE_QUEUE = "decode_queue", "From the commit until the scheduler admits the sequence."
    FIRST_DECODE_STEP = "first_decode_step", "From there to the decode worker's first token."


ROUTER_PHASES = (Phase.ADMIT, Phase.TOKENIZE, Phase.TURN, Phase.LOOKUP, Phase.CHOOSE, Phase.ACCEPT)
PROMPT_PHASES = (Phase.PULL, Phase.PREFILL_QUEUE, Phase.PREFILL_COMPUTE)
HAND_OVER = (Phase.CREDIT_WAIT, Phase.TRANSFER, Phase.DECODE_QUEUE, Phase.FIRST_DECODE_STEP)


class PhaseMetrics:
    """Histograms of the phases that take place in this process."""

    def __init__(self, registry: CollectorRegistry, phases: Iterable[Phase]) -> None:
        histogram = Histogram(
            "quire_request_phase_seconds",
            "Time of a request by phase.",
            ["phase"],
            buckets=PHASE_BUCKETS,
            registry=registry,
        )
        self._observe = {phase: histogram.labels(phase).observe for phase in phases}

    def observe(self, phase: Phase, seconds: float) -> None:
        """Record the duration of one phase of a request."""
        self._observe[phase](seconds)


class RequestPhases:
    """Records the phases of one request in this process, in the metrics and as children of its span.

    Args:
        metrics: None for embeddings, whose texts are computed at the same time: the sum of their phases says
            nothing about a time to a first token.
    """

    def __init__(self, metrics: PhaseMetrics | None, span: Span) -> None:
        self._metrics = metrics
        self.span = span

    def record(self, phase: Phase, start: float, end: float) -> None:
        """Record a phase that has ended; the times are readings of the tracer's clock."""
        if self._metrics is not None:
            self._metrics.observe(phase, end - start)
        self.span.part(phase, start, end)
