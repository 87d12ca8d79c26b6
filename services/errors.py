"""The errors that a service reports: a gRPC status, a reason for programs, a remedy for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]

ERROR_DOMAIN = "quire"
"""The ``domain`` of every ``google.rpc.ErrorInfo`` that a service sends."""


MAX_MESSAGE_CHARS = 1000
"""Longer messages are cut: they may repeat what a client sent, and gRPC drops a status of more than 8 KiB."""


class ServiceError(Exception):
    """An error with a gRPC status, raised anywhere in a service and sent by the server's interceptor.

    ``reason`` is an UPPER_SNAKE_CASE constant that programs may match; ``metadata`` names limits and values;
    ``retry_after_seconds`` tells the caller when a retry makes sense.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"

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
        self.reason = reason or self.default_reason
        self.metadata = {name: _cut(value) for name, value in (metadata or {}).items()}
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        return self.message

    def details(self) -> list[ErrorInfo | RetryInfo | BadRequest]:
        """Return the ``google.rpc`` messages that go with the status."""
        info = ErrorInfo(reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata)
        if self.retry_after_seconds is None:
            return [info]
        delay = Duration()
        delay.FromMilliseconds(round(self.retry_after_seconds * 1000))
        return [info, RetryInfo(retry_delay=delay)]


class InvalidArgument(ServiceError):
    """A field of the request has a value that can never be served."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"

    def __init__(
        self,
        field: str,
        problem: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field}: {problem}", reason=reason, metadata={"field": field, **(metadata or {})})
        # An exception is unpickled from its args: a worker's start error crosses a pipe.
        self.args = (field, problem)
        self.field = field
        self.problem = problem

    def details(self) -> list[ErrorInfo | RetryInfo | BadRequest]:
        """Return the usual messages and the field's violation."""
        violation = BadRequest.FieldViolation(field=self.field, description=_cut(self.problem))
        return [*super().details(), BadRequest(field_violations=[violation])]


class FailedPrecondition(ServiceError):
    """The request is well formed, but not for this server in its present state."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class OutOfRange(ServiceError):
    """The request goes on from where this server never was."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "OUT_OF_RANGE"


class NotFound(ServiceError):
    """The request names something that does not exist here."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExists(ServiceError):
    """The request names something that exists already."""

    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class Unauthenticated(ServiceError):
    """The caller did not show who it is."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class ResourceExhausted(ServiceError):
    """A limit is reached: the caller should slow down."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"


class Unavailable(ServiceError):
    """This server cannot take the request now: try another one, or later."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(ServiceError):
    """The request's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Aborted(ServiceError):
    """The request was ended half-way, by a fence, an abort or a lost hand-off."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class Unimplemented(ServiceError):
    """A call that this server does not serve."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class Internal(ServiceError):
    """A bug."""


class BadFileError(OSError):
    """A file that a setting names is missing, malformed or out of date: the message says which and how."""


def cannot_listen(host: str, port: int, problem: object = "") -> OSError:
    """Return the error of a server whose address cannot be bound."""
    reason = f": {problem}" if problem else ""
    return OSError(
        f"cannot listen on {host}:{port}{reason}: is the port taken? Try another, or 0 for a free one"
    )


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
