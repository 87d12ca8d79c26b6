"""What the HTTP server counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class HttpMetrics:
    """Counts of the requests that came over HTTP."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "quire_http_requests_total",
            "Requests over HTTP that were answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )

    def count(self, route: str, status: int) -> None:
        """Count a request that was answered."""
        self._requests.labels(route, str(status)).inc()
