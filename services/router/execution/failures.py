"""Classifies failed worker calls: worth another attempt, a worker's death, or an error for the client."""

from __future__ import annotations

from collections.abc import Mapping

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo  # type: ignore[import-untyped]
from grpc_status import rpc_status

from quire.rpc.errors import (
    ENGINE_FAILED,
    REQUEST_FAILED,
    RETRY_AFTER_SECONDS,
    SUSPECTED,
    TOO_LATE,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoWorker,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from quire.services.router.workers.output_reader import ENDED_BY_WORKER
from quire.services.router.workers.worker import Worker
from quire.services.router.workers.worker_set import WorkerSet

_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        # Another process answers at the worker's address, or the worker restarted with another secret.
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


# How gRPC's details begin if a call never reached its server, or if the worker stops.
_NO_DEATH = ("failed to connect", "name resolution", "dns resolution", ENDED_BY_WORKER)
# Part of gRPC's details if a ping was not answered: the process was stopped, or machine or network failed.
_NO_ANSWER = ("ping timeout", "keepalive watchdog timeout")


class WorkerCallFailed(Exception):
    """A worker call failed, or ended before its work was complete (then ``error`` is None).

    Attributes:
        reason: the worker's machine-readable reason; empty if the status came from gRPC itself.
    """

    def __init__(self, worker: Worker, error: grpc.aio.AioRpcError | None) -> None:
        self.worker = worker
        self.code = error.code() if error is not None else grpc.StatusCode.INTERNAL
        self.details = (error.details() or "") if error is not None else "the stream ended too early"
        self.reason = _reason(error) if error is not None else ""
        super().__init__(f"{worker.role} worker {worker.worker_id}: {self.code.name}: {self.details}")

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed on another worker."""
        return self.code in _RETRYABLE and self.reason != REQUEST_FAILED

    @property
    def is_unreachable(self) -> bool:
        """Whether the worker may be gone, so that it gets no requests until it has answered."""
        return self.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)

    @property
    def may_have_cause(self) -> bool:
        """Whether another failure, which may arrive later, may have caused it.

        A worker aborts its call when the other worker is gone. A worker whose engine fails ends its stream of
        outputs too, and gRPC may bring that before the error of its call.
        """
        return self.code is grpc.StatusCode.ABORTED or self.details == ENDED_BY_WORKER

    @property
    def is_death(self) -> bool:
        """Whether the worker died while it served the request: its engine failed or it closed its connection.

        A worker that vanished without closing its connection does not count: a request can crash a process,
        but not a network.
        """
        if self.reason:
            return self.reason == ENGINE_FAILED
        if self.worker.health.has_vanished or self.code is not grpc.StatusCode.UNAVAILABLE:
            return False
        details = self.details.lower()
        return not details.startswith(_NO_DEATH) and not any(text in details for text in _NO_ANSWER)


def _reason(error: grpc.aio.AioRpcError) -> str:
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the error has all methods that are used
    except (ValueError, DecodeError):  # the details are damaged, or contradict the status
        return ""
    info = ErrorInfo()
    is_found = status is not None and any(detail.Unpack(info) for detail in status.details)
    return str(info.reason) if is_found else ""


def suspected(request_id: str, num_workers: int, num_emitted: int, num_retries: int) -> ServiceError:
    """Return the error of a request that is not retried, because several workers died serving it."""
    return Internal(
        f"{num_workers} workers ended while they served request {request_id}, which may be why; "
        "it is not tried on another one",
        reason=SUSPECTED,
        metadata={"tokens_emitted": str(num_emitted), "retries": str(num_retries)},
    )


def to_service_error(
    failure: WorkerCallFailed, request_id: str, num_emitted: int, num_retries: int
) -> ServiceError:
    """Return the client's error for a failure that is not retried; only the log names the worker."""
    role = failure.worker.role
    metadata = {"tokens_emitted": str(num_emitted), "retries": str(num_retries)}
    if failure.reason == REQUEST_FAILED:
        return Internal(
            f"request {request_id} failed: {failure.details}", reason=REQUEST_FAILED, metadata=metadata
        )
    match failure.code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, _, problem = failure.details.partition(": ")
            return InvalidArgument(field, problem, reason=failure.reason or None, metadata=metadata)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return FailedPrecondition(f"the {role} worker refused: {failure.details}", metadata=metadata)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ResourceExhausted(
                f"the {role} worker is full: {failure.details}",
                metadata=metadata,
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return deadline_exceeded(num_emitted)
        case code if code in _RETRYABLE:
            return Unavailable(
                f"the {role} worker failed ({code.name}) and {num_retries} retries did not help; try again",
                reason="WORKER_LOST",
                metadata=metadata,
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        case code:
            return Internal(f"the {role} worker answered {code.name}", metadata=metadata)


def no_decode_worker(workers: WorkerSet, metadata: Mapping[str, str] | None = None) -> NoWorker:
    """Return the error of a request that found no decode worker that accepts requests, or may continue it."""
    if workers.serving("decode"):
        return NoWorker(
            "the decode workers that began the answer have left, and others have other weights; begin again",
            reason="NO_DECODE_WORKER",
            metadata=metadata,
        )
    if draining := workers.draining("decode"):
        number = (
            "the only decode worker is" if len(draining) == 1 else f"all {len(draining)} decode workers are"
        )
        return NoWorker(
            f"{number} draining; end that with `quire admin drain {draining[0].worker_id} --undo`, start "
            "another, or try again",
            reason="DRAINING",
            metadata=metadata,
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )
    return NoWorker(
        "no decode worker takes requests; start one, or try again",
        reason="NO_DECODE_WORKER",
        metadata=metadata,
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


def too_late(expected_seconds: float, remaining_seconds: float) -> ResourceExhausted:
    """Return the error of a request whose first token is expected long after its deadline."""
    return ResourceExhausted(
        f"the first token is expected after {expected_seconds:.1f} s, and the request has "
        f"{remaining_seconds:.1f} s; allow more time, or try again later",
        reason=TOO_LATE,
        retry_after_seconds=max(RETRY_AFTER_SECONDS, expected_seconds - remaining_seconds),
    )


def deadline_exceeded(num_emitted: int) -> DeadlineExceeded:
    """Return the error of a request whose deadline passed after ``num_emitted`` tokens."""
    return DeadlineExceeded(
        f"the request's deadline passed after {num_emitted} tokens; allow more time, or fewer max_tokens",
        metadata={"tokens_emitted": str(num_emitted)},
    )
