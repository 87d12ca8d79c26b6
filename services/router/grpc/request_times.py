"""Measures one request for the metrics, from its arrival to its end; then logs and traces it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import grpc

from quire.protos import inference_pb2 as pb
from quire.rpc.ended_calls import end_of
from quire.rpc.errors import ServiceError
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.tenants.limits import OWN_LIMITS
from quire.services.server.log import EventLogger
from quire.services.server.tracing import Span

OK = grpc.StatusCode.OK.name

_log = EventLogger("router")
_FINISH_NAMES = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}
_LOGGED_COUNTS = (
    *("prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
    *("blocks_shipped", "blocks_pulled", "retries"),
)


@dataclass(slots=True)
class _Answer:
    """Times of an answer's first and last tokens, readings of the clock, and the number of tokens."""

    first: float
    last: float
    num_tokens: int

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds per token after the first; None if all tokens arrived in one message."""
        num_more = self.num_tokens - 1
        return (self.last - self.first) / num_more if num_more and self.last > self.first else None


class RequestTimes:
    """Measures the messages that a client gets; most metrics are observed once, at the end of the request."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self.arrival = clock()
        self._ttft: float | None = None
        self._answers: dict[int, _Answer] = {}
        self._describe: Callable[[str, float], None] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the outcome and the times of the request when the context ends."""
        outcome, is_judged = OK, True
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            # A tenant could otherwise make the service look bad by exceeding its own limits.
            is_judged = not (isinstance(error, ServiceError) and error.reason in OWN_LIMITS)
            raise
        finally:
            self._ended(outcome, is_judged)

    def describe(self, request_id: str, tenant: str, usage: pb.Usage, span: Span) -> None:
        """Log and trace the request by these values when it ends, whether it succeeds or fails."""
        self._describe = partial(_describe, request_id, tenant, usage, span)

    def sent(self, response: pb.GenerateStreamResponse) -> None:
        """Record the time of a message; call this just before the message is sent to the client."""
        now, num_tokens = self._clock(), len(response.token_ids)
        if num_tokens:
            self._tokens(response.index, num_tokens, now)
        if response.HasField("usage"):
            metrics, usage = self._metrics, response.usage
            metrics.e2e_latency.observe(now - self.arrival)
            metrics.success.labels(_FINISH_NAMES[response.finish_reason]).inc()
            metrics.request_generation_tokens.observe(usage.completion_tokens)

    def embedded(self) -> None:
        """Record that the request was answered with embeddings, which count as its first token."""
        self._ttft = self._clock() - self.arrival
        self._metrics.e2e_latency.observe(self._ttft)
        self._metrics.success.labels("stop").inc()

    def _tokens(self, index: int, num_tokens: int, now: float) -> None:
        if self._ttft is None:
            self._ttft = now - self.arrival
            self._metrics.time_to_first_token.observe(self._ttft)
        if (answer := self._answers.get(index)) is None:
            self._answers[index] = _Answer(now, now, num_tokens)
            return
        self._metrics.inter_token_latency.observe(now - answer.last)
        self._metrics.token_times.num_tokens += num_tokens
        self._metrics.token_times.seconds += now - answer.last
        answer.last = now
        answer.num_tokens += num_tokens

    def _ended(self, outcome: str, is_judged: bool) -> None:
        times = [time for a in self._answers.values() if (time := a.time_per_output_token) is not None]
        for time in times:
            self._metrics.time_per_output_token.observe(time)
        if outcome != OK:
            self._metrics.failure.labels(outcome).inc()
        if is_judged:
            self._metrics.slo.judge(outcome, self._ttft, max(times, default=None))
        if self._describe is not None:
            self._describe(outcome, self._clock() - self.arrival)


def _describe(
    request_id: str, tenant: str, usage: pb.Usage, span: Span, outcome: str, seconds: float
) -> None:
    span.set(
        quire__request_id=request_id,
        quire__retries=usage.retries,
        quire__bytes_shipped=usage.bytes_shipped,
        gen_ai__usage__input_tokens=usage.prompt_tokens,
        gen_ai__usage__output_tokens=usage.completion_tokens,
        gen_ai__usage__cache_read__input_tokens=usage.cached_prompt_tokens,
    )
    _log.info(
        "request_finished",
        request_id=request_id,
        tenant=tenant,
        outcome=outcome,
        seconds=seconds,
        **{name: getattr(usage, name) for name in _LOGGED_COUNTS},
    )


def outcome_of(error: BaseException) -> str:
    """Return the name of the gRPC status of a request that ends the current call with this exception."""
    if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) is not None:
        error = end_of(task).error or error
    if isinstance(error, ServiceError):
        return error.code.name
    is_clients = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return (grpc.StatusCode.CANCELLED if is_clients else grpc.StatusCode.INTERNAL).name
