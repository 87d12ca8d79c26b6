"""Defines the errors of services: each has a gRPC status, a reason for programs, and a remedy for people."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

ERROR_DOMAIN = "quire"
"""Value of ``domain`` in every ``google.rpc.ErrorInfo`` that a service sends."""


NO_TOKEN_LEFT = "NO_TOKEN_LEFT"
"""Reason: the constraints of the request forbid every token."""
REQUEST_FAILED = "REQUEST_FAILED"
"""Reason: the request itself causes the failure, and would fail on any worker."""
ENGINE_FAILED = "ENGINE_FAILED"
"""Reason: the worker's engine failed while it served the request."""
SUSPECTED = "SUSPECTED_OF_ENDING_WORKERS"
"""Reason: several workers died while they served the request."""
TOO_LATE = "TOO_LATE"
"""Reason: the request would begin only after its deadline."""
ADAPTER_NOT_LOADED = "ADAPTER_NOT_LOADED"
"""Reason: no worker that could serve the request has its adapter, or not with the same weights."""
DRAINING = "DRAINING"
"""Reason: the server is about to stop, or was drained."""

RETRY_AFTER_SECONDS = 1.0
"""Time after which a refused client may try again, if the server has no better estimate."""

MAX_MESSAGE_CHARS = 1000
"""Maximum length of a message, in characters; longer ones are truncated. Messages may repeat a client's
input, and gRPC drops a status of more than 8 KiB."""


MAX_VALUE_CHARS = 200
"""Maximum length of a client's value in a message, in characters; longer ones are truncated."""


def shortened(text: str) -> str:
    """Return a client's text, truncated to ``MAX_VALUE_CHARS`` for use in a message."""
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def quoted(text: str) -> str:
    """Return a client's text, truncated like ``shortened``, in quotes."""
    return repr(shortened(text))


class ServiceError(Exception):
    """An error with a gRPC status. Any code of a service may raise it; the server's interceptor sends it.

    Args:
        reason: an UPPER_SNAKE_CASE constant that programs may match.
        metadata: limits and values, by name.
        retry_after_seconds: time after which a retry makes sense; None: no recommendation.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = ""
    """Reason of an error that is given none; empty: the name of its code."""

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _cut(message)
        self.reason = reason or self.default_reason or self.code.name
        self.metadata = {name: _cut(value) for name, value in (metadata or {}).items()}
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return self.message

    def details(self) -> list[ErrorInfo | RetryInfo | BadRequest]:
        """Return the ``google.rpc`` messages that are sent with the status."""
        info = ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata)
        if self.retry_after_seconds is None:
            return [info]
        delay = Duration()
        delay.FromMilliseconds(round(self.retry_after_seconds * 1000))
        return [info, RetryInfo(retry_delay=delay)]


class InvalidArgument(ServiceError):
    """A field of the request has a value that can never be served."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(
        self,
        field: str,
        problem: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field}: {problem}", reason=reason, metadata={"field": field, **(metadata or {})})
        # Pickle rebuilds an exception from its args: a worker's start-up error is sent through a pipe.
        self.args = (field, problem)
        self.field = field
        self.problem = problem

    def renamed(self, names: Mapping[str, str]) -> InvalidArgument:
        """Return the error with its field renamed by ``names``; an index such as ``[3]`` is kept."""
        name, bracket, index = self.field.partition("[")
        if name not in names:
            return self
        metadata = {key: value for key, value in self.metadata.items() if key != "field"}
        return InvalidArgument(
            names[name] + bracket + index, self.problem, reason=self.reason, metadata=metadata
        )

    def details(self) -> list[ErrorInfo | RetryInfo | BadRequest]:
        """Return the messages of every error, and a ``BadRequest`` that names the field."""
        violation = BadRequest.FieldViolation(field=self.field, description=_cut(self.problem))
        return [*super().details(), BadRequest(field_violations=[violation])]


class FailedPrecondition(ServiceError):
    """The request is well formed, but this server cannot serve it in its present state."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRange(ServiceError):
    """The request wants to continue from a position that this server does not have."""

    code = grpc.StatusCode.OUT_OF_RANGE


class NotFound(ServiceError):
    """The request names something that does not exist on this server."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    """The request wants to create something that exists already."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unauthenticated(ServiceError):
    """The caller did not prove its identity."""

    code = grpc.StatusCode.UNAUTHENTICATED


class ResourceExhausted(ServiceError):
    """A limit is reached; the caller should slow down."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"


class Unavailable(ServiceError):
    """This server cannot take the request now; the caller should try another server, or try again later.

    Attributes:
        has_waited: whether the request has waited here as long as it may. A channel with retries then does
            not send it again by itself, which would take as long each time.
    """

    code = grpc.StatusCode.UNAVAILABLE
    has_waited = False


class NoWorker(Unavailable):
    """No worker could take the request in the time for which it may wait for one."""

    has_waited = True


class DeadlineExceeded(ServiceError):
    """The request's deadline has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Aborted(ServiceError):
    """The request was ended before its completion, by a fence, an abort or a lost hand-off."""

    code = grpc.StatusCode.ABORTED


class Unimplemented(ServiceError):
    """This server does not implement the call."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(ServiceError):
    """The server failed unexpectedly; this is usually a bug."""


class BadFileError(OSError):
    """A file named in the settings is missing, malformed or out of date; the message has path and problem."""


_LISTEN_REMEDIES: Mapping[int, str] = {
    errno.EADDRINUSE: "another process has this port; end it, or give another port, or 0 for a free one",
    errno.EADDRNOTAVAIL: "this machine has no such address; give one that it has, or 0.0.0.0 for all",
    errno.EACCES: "this user may not listen at this port; give one above 1023",
}


def cannot_listen(host: str, port: int, error: OSError | None) -> OSError:
    """Return the error of a server whose address cannot be bound, with a remedy.

    Args:
        error: the system's error, if it is known.
    """
    number = (error and error.errno) or 0
    problem = (
        os.strerror(number) if number > 0 else (error and error.strerror) or "the system gives no reason"
    )
    remedy = _LISTEN_REMEDIES.get(number, "is it an address of this machine?")
    return OSError(f"cannot listen on {host}:{port}: {problem}: {remedy}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


def to_status(error: ServiceError) -> Status:
    """Return the ``google.rpc.Status`` of an error."""
    packed = []
    for detail in error.details():
        message = AnyMessage()
        message.Pack(detail)
        packed.append(message)
    return Status(code=error.code.value[0], message=error.message, details=packed)
