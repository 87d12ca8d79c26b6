"""What a failed leg means: another attempt, or which error for the client."""

from __future__ import annotations

import grpc

from quire.services.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
)
from quire.services.router.workers import Worker

RETRY_AFTER_SECONDS = 1.0

_RETRYABLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)


class LegFailed(Exception):
    """A worker's stream failed, or ended before its work did (then there is no error)."""

    def __init__(self, worker: Worker, error: grpc.aio.AioRpcError | None) -> None:
        self.worker = worker
        self.code = error.code() if error is not None else grpc.StatusCode.INTERNAL
        self.details = (error.details() or "") if error is not None else "the stream ended too early"
        super().__init__(f"{worker.info.role} worker {worker.worker_id}: {self.code.name}: {self.details}")

    @property
    def is_retryable(self) -> bool:
        """Whether another worker may succeed."""
        return self.code in _RETRYABLE

    @property
    def is_unreachable(self) -> bool:
        """Whether other requests should prefer other workers for a while."""
        return self.code is grpc.StatusCode.UNAVAILABLE


def to_service_error(failure: LegFailed, num_emitted: int, num_retries: int) -> ServiceError:
    """Return the client's error for a failure that is not retried; worker names stay in the log."""
    role = failure.worker.info.role
    metadata = {"tokens_emitted": str(num_emitted), "retries": str(num_retries)}
    match failure.code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, _, problem = failure.details.partition(": ")
            return InvalidArgument(field, problem, metadata=metadata)
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


def deadline_exceeded(num_emitted: int) -> DeadlineExceeded:
    """Return the error of a request whose time is over."""
    return DeadlineExceeded(
        f"the request's deadline passed after {num_emitted} tokens; allow more time, or fewer max_tokens",
        metadata={"tokens_emitted": str(num_emitted)},
    )
