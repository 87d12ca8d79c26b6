"""The errors that a call can raise: catch ``QuireError`` for all of them, or a subclass to act on one.

QuireError
├── InvalidRequest     a value can never be served: ``field`` names it, ``limit`` is its bound
├── Unauthenticated    the API key is missing or unknown
├── NotFound           the model, or another object that the request names, is not served here
├── Unsupported        the server cannot do this at all, or not in its present state
├── Overloaded         a queue is full or a tenant's limit is reached: retry in ``retry_after`` seconds
├── Unavailable        no server answers or can accept the request: retry in ``retry_after`` seconds
├── DeadlineExceeded   the call's ``timeout`` has passed
├── Interrupted        the request was ended by an abort or a lost hand-off: send it again
├── Cancelled          the call was cancelled by the client
└── ServerError        the server has a bug, or bytes were damaged in transit
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

_DETAILS_KEY = "grpc-status-details-bin"
_TOO_LARGE = "CLIENT: Received message larger"
"""Part of gRPC's own message about an answer that the client cannot receive; no retry would help."""
_NO_RETRY = ("grpc-retry-pushback-ms", "-1")


class QuireError(Exception):
    """A call failed with the gRPC status ``code``; ``reason`` is a constant that programs may match."""

    has_waited = False
    """Whether the request has waited at the router as long as it may: sending it again would wait again."""

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode = grpc.StatusCode.UNKNOWN,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after


class InvalidRequest(QuireError):
    """A value of the request can never be served."""

    @property
    def field(self) -> str:
        """Name of the offending field, or an empty string."""
        return self.metadata.get("field", "")

    @property
    def limit(self) -> str:
        """The bound that the value broke, or an empty string."""
        return self.metadata.get("limit", "")


class Unauthenticated(QuireError):
    """The API key is missing or unknown."""


class NotFound(QuireError):
    """The model, or another object that the request names, is not served here."""


class Unsupported(QuireError):
    """The server cannot do this at all, or not in its present state."""


class Overloaded(QuireError):
    """A queue is full, or a limit of the tenant is reached: try again in ``retry_after`` seconds."""


class Unavailable(QuireError):
    """No server answers, or no server can accept the request now."""


class DeadlineExceeded(QuireError):
    """The call's ``timeout`` has passed."""


class Interrupted(QuireError):
    """The request was ended before it was finished; sending it again is safe."""


class Cancelled(QuireError):
    """The call was cancelled by the client."""


class ServerError(QuireError):
    """The server has a bug, or bytes were damaged in transit."""


_CLASSES: Mapping[grpc.StatusCode, type[QuireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.FAILED_PRECONDITION: Unsupported,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: Interrupted,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def invalid_request(field: str, problem: str, **metadata: str) -> InvalidRequest:
    """Return the error for a value that the client refuses before it sends anything."""
    return InvalidRequest(
        f"{field}: {problem}", code=grpc.StatusCode.INVALID_ARGUMENT, metadata={"field": field, **metadata}
    )


def client_closed() -> Cancelled:
    """Return the error of calls that a client's end has cut, and of later ones."""
    code = grpc.StatusCode.CANCELLED
    return Cancelled("the client was closed", code=code, reason=code.name)


def from_status(
    number: int, message: str, *, reason: str, metadata: Mapping[str, str], retry_after: float | None
) -> QuireError:
    """Return the typed error for a status that was part of a message."""
    code = next((code for code in grpc.StatusCode if code.value[0] == number), grpc.StatusCode.UNKNOWN)
    kind = _CLASSES.get(code, ServerError)
    return kind(message, code=code, reason=reason, metadata=metadata, retry_after=retry_after)


def from_rpc_error(error: Any) -> QuireError:
    """Return the typed error for a failed call, sync or async."""
    code: grpc.StatusCode = error.code()
    info, retry_after = _details(error.trailing_metadata())
    kind = _CLASSES.get(code, ServerError)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in (error.details() or ""):
        kind = ServerError
    typed = kind(
        error.details() or code.name,
        code=code,
        reason=info.reason or code.name,
        metadata=info.metadata,
        retry_after=retry_after,
    )
    typed.has_waited = _NO_RETRY in tuple(error.trailing_metadata() or ())
    return typed


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turn gRPC's errors into ``QuireError`` inside the context."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def _details(trailing_metadata: Any) -> tuple[ErrorInfo, float | None]:
    """Return the ``ErrorInfo`` of a status, empty if it has none, and the retry delay in seconds or None."""
    info, retry = ErrorInfo(), RetryInfo()
    for key, value in trailing_metadata or ():
        if key == _DETAILS_KEY:
            for detail in _parse_status(value).details:
                # Unpack returns whether the detail has that type.
                detail.Unpack(info) or detail.Unpack(retry)
    if not retry.HasField("retry_delay"):
        return info, None
    return info, float(retry.retry_delay.ToTimedelta().total_seconds())


def _parse_status(encoded: bytes) -> Status:
    try:
        return Status.FromString(encoded)
    except DecodeError:
        # A proxy may damage the details; the status code still says what happened.
        return Status()
