"""Defines the metrics of the HTTP server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class HttpMetrics:
    """Counts the requests over HTTP, by route and status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "quire_http_requests_total",
            "Requests over HTTP that were answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )

    def count(self, route: str, status: int) -> None:
        """Count one answered request."""
        self._requests.labels(route, str(status)).inc()
