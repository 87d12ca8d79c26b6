"""Metrics of the blocks that a worker serves to pulls, and of those that it pulls."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.kvtransfer.errors import BadBlockError, DigestMismatchError
from quire.kvtransfer.transports.transport import Transport

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class PullMetrics:
    """Registers and updates the metrics of both ends of pulls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        blocks = Counter("quire_kv_pull_blocks_total", "KV blocks pulled.", ["direction"], registry=registry)
        self._bytes = Counter(
            "quire_kv_pull_bytes_total",
            "KV bytes pulled.",
            ["direction", "transport"],
            registry=registry,
        )
        self._lent_blocks, self._pulled_blocks = blocks.labels("lent"), blocks.labels("pulled")
        for direction in ("lent", "pulled"):
            for transport in (Transport.MESSAGES, Transport.SHARED):
                self._bytes.labels(direction, transport)
        self._seconds = Histogram(
            "quire_kv_pull_seconds", "Pull, from pin to release.", buckets=_SECONDS, registry=registry
        )
        self._failures = Counter(
            "quire_kv_pull_failures_total",
            "Pulls that brought less than they were to.",
            ["reason"],
            registry=registry,
        )
        for reason in (BadBlockError.reason, DigestMismatchError.reason, "evicted", "no_blocks", "timeout"):
            self._failures.labels(reason)
        self._leases = Gauge("quire_kv_pull_leases", "Leases on blocks of this worker.", registry=registry)
        self._expired = Counter(
            "quire_kv_pull_leases_expired_total", "Leases that ended without a release.", registry=registry
        )

    def lent(self, num_blocks: int, num_bytes: int, transport: Transport) -> None:
        """Count blocks that are being sent to another worker."""
        self._lent_blocks.inc(num_blocks)
        self._bytes.labels("lent", transport).inc(num_bytes)

    def record_pull(self, num_blocks: int, num_bytes: int, seconds: float, transport: Transport) -> None:
        """Count the blocks of one pull that were checked and written."""
        self._pulled_blocks.inc(num_blocks)
        self._bytes.labels("pulled", transport).inc(num_bytes)
        self._seconds.observe(seconds)

    def record_failure(self, reason: str) -> None:
        """Count a pull that brought fewer blocks than it was meant to."""
        self._failures.labels(reason).inc()

    def leases(self, count: int) -> None:
        """Set the number of leases."""
        self._leases.set(count)

    def expired(self) -> None:
        """Count a lease that expired."""
        self._expired.inc()
