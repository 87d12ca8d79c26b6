"""Failures have series before they happen."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from quire.kvtransfer import errors
from quire.kvtransfer.metrics import RECEIVER_ERRORS, TransferMetrics

OTHER_ENDS = {errors.PushFailedError, errors.PullFailedError, errors.UnknownLeaseError}
"""What a sender, a borrower and a holder meet."""


def test_every_error_of_a_receiver_is_counted_from_zero() -> None:
    known = {errors.TransferError, *errors.TransferError.__subclasses__()}
    assert set(RECEIVER_ERRORS) == known - OTHER_ENDS
    registry = CollectorRegistry()
    TransferMetrics(registry)
    for error in RECEIVER_ERRORS:
        labels = {"kind": "push", "reason": error.reason}
        assert registry.get_sample_value("quire_kv_transfer_failures_total", labels) == 0.0
