"""Defines what measures a router; its metrics have vLLM's suffixes after the prefix ``quire_``."""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.kvindex.worker_record import ROLES
from quire.services.router.config import SloTargets
from quire.services.router.metrics.slo import SloMetrics
from quire.services.router.metrics.turns import Turns
from quire.services.server.phases import ROUTER_PHASES, PhaseMetrics
from quire.services.server.tracing import Tracer

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
TOKEN_BUCKETS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000),
    *(10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000),
)
REASONS = ("only", "prefix", "pull", "load", "tie", "imbalance")
FINISHED_REASONS = ("stop", "length")
RETRY_CAUSES = tuple(
    code.name.lower()
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.DATA_LOSS)
)


@dataclass(slots=True)
class TokenTimes:
    """All tokens after the first of each answer, and the time that they took, summed over the answers."""

    num_tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class TenantCounts:
    """What a tenant has asked of this router."""

    num_requests: int = 0
    """Requests that have been admitted and have not finished."""
    num_waiting: int = 0
    """Of these, requests that wait for a place within the tenant's limit."""
    num_tokens: int = 0
    """Tokens of its prompts and answers since the router started."""


class RouterMetrics:
    """The router's metrics, registered in the given registry."""

    def __init__(self, registry: CollectorRegistry, slo: SloTargets | None = None) -> None:
        self.registry = registry
        counter = partial(_counter, registry)
        self.token_times = TokenTimes()
        self.tenants: defaultdict[str, TenantCounts] = defaultdict(TenantCounts)
        self.phases = PhaseMetrics(registry, ROUTER_PHASES)
        self.slo = SloMetrics(registry, slo or SloTargets())
        self._shown: set[tuple[str, str, str]] = set()
        self._create_gauges()
        self.prompt_tokens = counter(
            "prompt_tokens", "Tokens of the prompts of accepted requests, and those in `received`."
        )
        self.prompt_tokens_cached = counter(
            "prompt_tokens_cached", "Prompt tokens whose KV was not computed."
        )
        self.prompt_tokens_predicted = counter(
            "prompt_tokens_predicted", "Prompt tokens that were cached according to the index."
        )
        self.generation_tokens = counter(
            "generation_tokens", "Tokens of answers, including those that best_of does not return."
        )
        self.success = counter(
            "request_success", "Requests that were answered completely.", "finished_reason"
        )
        self.failure = counter("request_failure", "Requests that ended with an error.", "grpc_code")
        self.rejections = counter("admission_rejections", "Requests that were refused immediately.", "reason")
        self.decisions = counter("router_decision", "Choices of a worker.", "role", "reason")
        self.expected_tokens = counter(
            "router_expected_tokens",
            "Prompt tokens that were expected to be cached or pulled, and that were.",
            "kind",
        )
        self.expected_seconds = counter(
            "router_expected_seconds",
            "Seconds from the choice of workers to the first token: expected, and taken.",
            "kind",
        )
        self.pulls = counter("kv_pull_requests", "Requested pulls, by how they ended.", "result")
        self.retries = counter(
            "retries",
            "Failed attempts that were repeated, by the role of the worker and its gRPC status.",
            "role",
            "cause",
        )
        self._create_times()
        self.turns = Turns(registry)
        self.ended_session_blocks = counter(
            "ended_session_blocks", "Cached blocks that were dropped because their session ended."
        )
        self._begin_at_zero()

    def _create_gauges(self) -> None:
        gauge = partial(Gauge, registry=self.registry)
        self.requests_running = gauge("quire_router_requests_running", "Requests accepted and not finished.")
        self.requests_waiting = gauge("quire_router_requests_waiting", "Requests that wait for a worker.")
        self.request_bytes = gauge(
            "quire_router_request_bytes", "Bytes of the requests under way, without the first 64 KiB of each."
        )
        self.workers = gauge("quire_workers", "Live workers.", ["role"])
        self.revision_workers = gauge(
            "quire_revision_workers",
            "Workers by revision, role and state; waiting: the revision lacks a worker of the other role.",
            ["revision", "role", "state"],
        )

    def _create_times(self) -> None:
        histogram = partial(_histogram, self.registry)
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two messages with tokens.", ITL_BUCKETS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time of an answer's tokens after its first.",
            ITL_BUCKETS,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS
        )
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens of a finished request's answers.", TOKEN_BUCKETS
        )

    def show_revisions(self, workers: Iterable[tuple[str, str, str]]) -> None:
        """Show how many workers have each revision, role and state; what has no worker disappears."""
        numbers = Tally(workers)
        for labels in self._shown - numbers.keys():
            self.revision_workers.remove(*labels)
        for labels, number in numbers.items():
            self.revision_workers.labels(*labels).set(number)
        self._shown = set(numbers)

    def _begin_at_zero(self) -> None:
        """Create the labelled counters at zero: ``rate`` misses the first increment of a new counter."""
        for reason in FINISHED_REASONS:
            self.success.labels(reason)
        for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL", "CANCELLED"):
            self.failure.labels(code)
        for reason in ("max_requests", "tenant_requests", "tenant_tokens", "too_late", "max_request_bytes"):
            self.rejections.labels(reason)
        self.pulls.labels("ok")
        for role in ROLES:
            for reason in REASONS:
                self.decisions.labels(role, reason)
            for cause in RETRY_CAUSES:
                self.retries.labels(role, cause)
        self.decisions.labels("prefill", "none")


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"quire_{name}_total", text, labels, registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"quire_{name}", text, buckets=buckets, registry=registry)


class Instruments(NamedTuple):
    """Metrics, tracer and clock of a router."""

    metrics: RouterMetrics
    tracer: Tracer
    clock: Callable[[], float]
    """Returns monotonic seconds."""
