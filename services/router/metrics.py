"""What the router counts; the names follow vLLM's suffixes under ``quire_``."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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


class RouterMetrics:
    """The router's metrics, in an injected registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests_running = Gauge(
            "quire_requests_running", "Requests accepted and not finished.", registry=registry
        )
        self.workers = Gauge("quire_workers", "Live workers.", ["role"], registry=registry)
        self.prompt_tokens = _counter(registry, "prompt_tokens", "Prompt tokens of accepted requests.")
        self.prompt_tokens_cached = _counter(
            registry, "prompt_tokens_cached", "Prompt tokens whose KV was not computed."
        )
        self.generation_tokens = _counter(registry, "generation_tokens", "Tokens sent to clients.")
        self.success = _counter(registry, "request_success", "Requests answered whole.", "finished_reason")
        self.failure = _counter(
            registry, "request_failure", "Requests that ended with an error.", "grpc_code"
        )
        self.rejections = _counter(registry, "admission_rejections", "Requests refused at once.", "reason")
        self.decisions = _counter(registry, "router_decision", "Choices of a worker.", "role", "reason")
        self.expected_tokens = _counter(
            registry,
            "router_expected_tokens",
            "Prompt tokens that were expected to be cached or pulled, and were found so.",
            "kind",
        )
        self.expected_seconds = _counter(
            registry,
            "router_expected_seconds",
            "Seconds from the choice to the first token: expected, and taken.",
            "kind",
        )
        self.pulls = _counter(
            registry, "kv_pull_requests", "Pulls that were asked for, by how they ended.", "result"
        )
        self.prefill_retries = _counter(registry, "prefill_retries", "Attempts lost on the prefill worker.")
        self.decode_retries = _counter(registry, "decode_retries", "Attempts lost on the decode worker.")
        self.time_to_first_token = _histogram(
            registry, "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = _histogram(
            registry, "inter_token_latency_seconds", "Between two messages with tokens.", ITL_BUCKETS
        )
        self.e2e_latency = _histogram(
            registry, "e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS
        )


def _counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    return Counter(f"quire_{name}_total", text, labels, registry=registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"quire_{name}", text, buckets=buckets, registry=registry)
