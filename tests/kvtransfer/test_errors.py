"""The errors of transfers, as the other end and the metrics see them."""

from __future__ import annotations

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.kvtransfer.errors import PullFailedError, PushFailedError, TransferError, UnknownLeaseError
from quire.kvtransfer.metrics import RECEIVER_ERRORS, TransferMetrics

KINDS: list[type[TransferError]] = [TransferError, *TransferError.__subclasses__()]
OTHER_ENDS = {PushFailedError, PullFailedError, UnknownLeaseError}
"""What a sender, a borrower and a holder meet."""


def test_every_error_has_a_reason_of_its_own() -> None:
    assert len({kind.reason for kind in KINDS}) == len(KINDS)


def test_no_error_is_reported_as_success() -> None:
    assert all(kind.code is not grpc.StatusCode.OK for kind in KINDS)


@pytest.mark.parametrize("kind", [PushFailedError, PullFailedError])
def test_a_failure_at_the_other_end_keeps_its_status(kind: type[PushFailedError | PullFailedError]) -> None:
    error = kind(grpc.StatusCode.NOT_FOUND, "no such ticket")
    assert error.status is grpc.StatusCode.NOT_FOUND
    assert str(error) == "NOT_FOUND: no such ticket"


def test_every_error_of_a_receiver_is_counted_from_zero() -> None:
    assert set(RECEIVER_ERRORS) == set(KINDS) - OTHER_ENDS
    registry = CollectorRegistry()
    TransferMetrics(registry)
    for error in RECEIVER_ERRORS:
        labels = {"kind": "push", "reason": error.reason}
        assert registry.get_sample_value("quire_kv_transfer_failures_total", labels) == 0.0
