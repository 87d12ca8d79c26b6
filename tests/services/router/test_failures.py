"""What a failed worker call means: another attempt, a suspicion, or an error for the client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest
from grpc_status import rpc_status

from quire.protos import worker_pb2
from quire.rpc.errors import (
    ENGINE_FAILED,
    REQUEST_FAILED,
    RETRY_AFTER_SECONDS,
    SUSPECTED,
    InvalidArgument,
    ServiceError,
    Unavailable,
    to_status,
)
from quire.services.router.execution.failures import (
    WorkerCallFailed,
    deadline_exceeded,
    no_decode_worker,
    suspected,
    to_service_error,
)
from quire.services.router.workers.output_reader import ENDED_BY_WORKER
from quire.services.router.workers.worker import Worker, WorkerConnection

Code = grpc.StatusCode
WORKER = Worker(
    "10.0.0.5:9000",
    worker_pb2.GetWorkerInfoResponse(worker_id="secret-name", role="decode"),
    cast(WorkerConnection, None),
)


def failed(code: grpc.StatusCode, details: str = "scripted", reason: str = "") -> WorkerCallFailed:
    """Return a failure as gRPC reports it, or with a reason as a worker does."""
    trailing: Any = grpc.aio.Metadata()
    if reason:
        error = ServiceError(details, reason=reason)
        packed = to_status(error)
        packed.code = code.value[0]
        trailing = grpc.aio.Metadata(*rpc_status.to_status(packed).trailing_metadata)
    return WorkerCallFailed(WORKER, grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, ""))


RETRYABLE = {
    *(Code.UNAVAILABLE, Code.ABORTED, Code.DATA_LOSS, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN),
    Code.UNAUTHENTICATED,
}


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_only_failures_of_the_worker_are_tried_on_another(code: grpc.StatusCode) -> None:
    assert failed(code).is_retryable == (code in RETRYABLE)
    assert not failed(code, reason=REQUEST_FAILED).is_retryable


def test_a_stream_that_ends_too_early_is_tried_again() -> None:
    failure = WorkerCallFailed(WORKER, None)
    assert (failure.is_retryable, failure.is_death, failure.is_unreachable) == (True, False, False)
    assert "ended too early" in str(failure)


@pytest.mark.parametrize(
    ("failure", "is_death", "is_unreachable"),
    [
        (failed(Code.UNAVAILABLE, "Socket closed"), True, True),
        (failed(Code.UNAVAILABLE, "Stream removed (ping timeout)"), False, True),
        (failed(Code.UNAVAILABLE, "failed to connect to all addresses"), False, True),
        (failed(Code.UNAVAILABLE, "DNS resolution failed for x"), False, True),
        (failed(Code.UNAVAILABLE, ENDED_BY_WORKER), False, True),
        (failed(Code.UNAVAILABLE, "this worker stops", "DRAINING"), False, True),
        (failed(Code.UNAVAILABLE, "CUDA error", ENGINE_FAILED), True, True),
        (failed(Code.UNAUTHENTICATED), False, True),
        (failed(Code.ABORTED), False, False),
        (failed(Code.INTERNAL, "a defect", REQUEST_FAILED), False, False),
    ],
)
def test_a_death_differs_from_a_refusal_and_from_an_unreachable_worker(
    failure: WorkerCallFailed, is_death: bool, is_unreachable: bool
) -> None:
    assert (failure.is_death, failure.is_unreachable) == (is_death, is_unreachable)


@pytest.mark.parametrize(
    "status", [b"not a message", to_status(InvalidArgument("a", "b")).SerializeToString()]
)
def test_damaged_details_are_no_reason(status: bytes) -> None:
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", status))
    error = grpc.aio.AioRpcError(Code.UNAVAILABLE, grpc.aio.Metadata(), metadata, "gone", "")
    assert WorkerCallFailed(WORKER, error).reason == ""


@pytest.mark.parametrize(
    ("failure", "code", "reason", "retry_after"),
    [
        (failed(Code.FAILED_PRECONDITION), Code.FAILED_PRECONDITION, "FAILED_PRECONDITION", None),
        (failed(Code.RESOURCE_EXHAUSTED), Code.RESOURCE_EXHAUSTED, "OVERLOADED", RETRY_AFTER_SECONDS),
        (failed(Code.DEADLINE_EXCEEDED), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", None),
        (failed(Code.ABORTED), Code.UNAVAILABLE, "WORKER_LOST", RETRY_AFTER_SECONDS),
        (failed(Code.UNAUTHENTICATED), Code.UNAVAILABLE, "WORKER_LOST", RETRY_AFTER_SECONDS),
        (failed(Code.INTERNAL, reason=REQUEST_FAILED), Code.INTERNAL, REQUEST_FAILED, None),
        (failed(Code.NOT_FOUND), Code.INTERNAL, "INTERNAL", None),
    ],
)
def test_the_error_has_the_remedy_and_not_the_address_of_the_worker(
    failure: WorkerCallFailed, code: grpc.StatusCode, reason: str, retry_after: float | None
) -> None:
    error = to_service_error(failure, "request-7", num_emitted=5, num_retries=2)
    assert (error.code, error.reason, error.retry_after_seconds) == (code, reason, retry_after)
    assert error.metadata["tokens_emitted"] == "5"
    assert WORKER.worker_id in str(failure)
    assert WORKER.worker_id not in error.message
    assert WORKER.address not in error.message


def test_a_clients_mistake_that_the_worker_found_keeps_its_field() -> None:
    failure = failed(Code.INVALID_ARGUMENT, "sampling.n: must be 1: it is 2", "WRONG")
    error = to_service_error(failure, "r", 0, 0)
    assert isinstance(error, InvalidArgument)
    assert (error.field, error.problem, error.reason) == ("sampling.n", "must be 1: it is 2", "WRONG")


def test_the_last_errors_count_the_tokens_that_the_client_has() -> None:
    error = suspected("r", num_workers=2, num_emitted=3, num_retries=1)
    assert (error.reason, error.metadata) == (SUSPECTED, {"tokens_emitted": "3", "retries": "1"})
    assert deadline_exceeded(4).metadata == {"tokens_emitted": "4"}


@pytest.mark.parametrize(
    ("num_draining", "reason", "text"),
    [
        (0, "NO_DECODE_WORKER", "no decode worker takes requests"),
        (1, "DRAINING", "the only decode worker is draining"),
        (3, "DRAINING", "all 3 decode workers are draining"),
    ],
)
def test_the_error_without_a_decode_worker_has_the_cause(num_draining: int, reason: str, text: str) -> None:
    draining = {"decode": [WORKER] * num_draining}
    workers: Any = SimpleNamespace(serving=lambda role: [], draining=lambda role: draining[role])
    error = no_decode_worker(workers, {"tokens_emitted": "2"})
    assert isinstance(error, Unavailable)
    assert error.reason == reason
    assert text in error.message
    assert error.has_waited
    assert error.metadata == {"tokens_emitted": "2"}
    assert error.retry_after_seconds == RETRY_AFTER_SECONDS
