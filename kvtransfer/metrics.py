"""Metrics of the blocks that a worker sends or receives by pushes and pulls."""

from __future__ import annotations

from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from quire.kvtransfer import errors
from quire.kvtransfer.frame import Transport
from quire.kvtransfer.push_sender import PushSummary

RECEIVER_ERRORS = (
    errors.BadBlockError,
    errors.DigestMismatchError,
    errors.LayoutMismatchError,
    errors.NoBlocksError,
    errors.NotSharedError,
    errors.ProtocolError,
    errors.SenderGoneError,
    errors.StaleAttemptError,
    errors.StaleEpochError,
    errors.TransferError,
    errors.UnknownTicketError,
)
"""Errors with which a receiver ends a push. Their counters start at 0, since a rate needs a first value."""

PULL_FAILURES = (
    errors.BadBlockError.reason,
    errors.DigestMismatchError.reason,
    "evicted",
    "no_blocks",
    "timeout",
)

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class TransferMetrics:
    """Registers and updates the metrics of pushes and pulls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._blocks = counter(
            "quire_kv_transfer_blocks_total",
            "KV blocks moved: received and sent by pushes, pulled from peers, and lent to peers that pull.",
            ["direction"],
        )
        self._bytes = counter(
            "quire_kv_transfer_bytes_total", "The same in bytes.", ["direction", "transport"]
        )
        for direction in ("received", "sent", "pulled", "lent"):
            self._blocks.labels(direction)
            for transport in (Transport.MESSAGES, Transport.SHARED):
                self._bytes.labels(direction, transport)
        self._push_seconds = histogram("quire_kv_push_seconds", "Push, from open to commit.")
        self._pull_seconds = histogram("quire_kv_pull_seconds", "Pull, from pin to release.")
        self._credit_wait = histogram(
            "quire_kv_credit_wait_seconds",
            "Time of a push in which blocks were ready and the receiver had no room.",
        )
        self._failures = counter(
            "quire_kv_transfer_failures_total",
            "Pushes that failed at the receiver, and pulls that did not bring all their blocks.",
            ["kind", "reason"],
        )
        for error in RECEIVER_ERRORS:
            self._failures.labels("push", error.reason)
        for reason in PULL_FAILURES:
            self._failures.labels("pull", reason)
        self._saved_bytes = counter(
            "quire_kv_transfer_saved_bytes_total",
            "KV bytes that were not sent, since the receiver had the blocks or did not need them.",
        )
        self._leases = Gauge("quire_kv_leases", "Leases on blocks of this worker.", registry=registry)
        self._expired = counter("quire_kv_leases_expired_total", "Leases that ended without a release.")

    def record_push(self, summary: PushSummary) -> None:
        """Count a sent push that was committed."""
        self._record("sent", summary.num_blocks, summary.num_bytes, summary.transport)
        self._saved_bytes.inc(summary.num_saved_bytes)
        self._push_seconds.observe(summary.seconds)
        self._credit_wait.observe(summary.credit_wait_seconds)

    def record_received(self, num_bytes: int, transport: Transport) -> None:
        """Count a received block that was checked and written."""
        self._record("received", 1, num_bytes, transport)

    def record_lent(self, num_blocks: int, num_bytes: int, transport: Transport) -> None:
        """Count blocks that are being sent to a worker that pulls them."""
        self._record("lent", num_blocks, num_bytes, transport)

    def record_pull(self, num_blocks: int, num_bytes: int, seconds: float, transport: Transport) -> None:
        """Count the blocks of one pull that were checked and written."""
        self._record("pulled", num_blocks, num_bytes, transport)
        self._pull_seconds.observe(seconds)

    def record_failure(self, kind: Literal["push", "pull"], reason: str) -> None:
        """Count a received push that ended without a commit, or a pull that did not bring all its blocks."""
        self._failures.labels(kind, reason).inc()

    def set_leases(self, count: int) -> None:
        """Set the number of leases."""
        self._leases.set(count)

    def record_expired(self) -> None:
        """Count a lease that expired."""
        self._expired.inc()

    def _record(self, direction: str, num_blocks: int, num_bytes: int, transport: Transport) -> None:
        self._blocks.labels(direction).inc(num_blocks)
        self._bytes.labels(direction, transport).inc(num_bytes)
