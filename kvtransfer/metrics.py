"""Metrics of the block transfers of a worker."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from quire.kvtransfer.errors import (
    BadBlockError,
    DigestMismatchError,
    LayoutMismatchError,
    NoBlocksError,
    NotSharedError,
    ProtocolError,
    SenderGoneError,
    StaleAttemptError,
    StaleEpochError,
    TransferError,
    UnknownTicketError,
)
from quire.kvtransfer.push_sender import PushSummary
from quire.kvtransfer.transports.transport import Transport

RECEIVER_ERRORS = (
    BadBlockError,
    DigestMismatchError,
    LayoutMismatchError,
    NoBlocksError,
    NotSharedError,
    ProtocolError,
    SenderGoneError,
    StaleAttemptError,
    StaleEpochError,
    TransferError,
    UnknownTicketError,
)
"""Errors with which a receiver ends a push. Each has a counter from the start: a rate needs a first value."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class TransferMetrics:
    """Registers and updates the metrics of sent and received pushes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        blocks = Counter(
            "quire_kv_blocks_transferred_total", "KV blocks moved.", ["direction"], registry=registry
        )
        self._bytes = Counter(
            "quire_kv_transfer_bytes_total",
            "KV bytes moved by pushes.",
            ["direction", "transport"],
            registry=registry,
        )
        self._received_blocks, self._sent_blocks = blocks.labels("received"), blocks.labels("sent")
        for direction in ("received", "sent"):
            for transport in (Transport.MESSAGES, Transport.SHARED):
                self._bytes.labels(direction, transport)
        self._seconds = Histogram(
            "quire_kv_transfer_seconds", "Push, from open to commit.", buckets=_SECONDS, registry=registry
        )
        self._credit_wait = Histogram(
            "quire_kv_credit_wait_seconds",
            "Part of a push in which blocks were ready and the receiver had no room.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._failures = Counter(
            "quire_kv_transfer_failures_total",
            "Pushes that failed at the receiver.",
            ["reason"],
            registry=registry,
        )
        for error in RECEIVER_ERRORS:
            self._failures.labels(error.reason)
        self._saved_bytes = Counter(
            "quire_kv_transfer_saved_bytes_total",
            "KV bytes that were not sent, since the receiver had the blocks or needs none of them.",
            registry=registry,
        )

    def record_push(self, summary: PushSummary) -> None:
        """Count a sent push that was committed."""
        self._sent_blocks.inc(summary.num_blocks)
        self._bytes.labels("sent", summary.transport).inc(summary.num_bytes)
        self._saved_bytes.inc(summary.num_saved_bytes)
        self._seconds.observe(summary.seconds)
        self._credit_wait.observe(summary.credit_wait_seconds)

    def record_received(self, num_bytes: int, transport: Transport) -> None:
        """Count a received block that was checked and written."""
        self._received_blocks.inc()
        self._bytes.labels("received", transport).inc(num_bytes)

    def record_failure(self, reason: str) -> None:
        """Count a received push that ended without a commit."""
        self._failures.labels(reason).inc()
