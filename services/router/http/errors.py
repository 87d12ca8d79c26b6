"""Errors as OpenAI's clients read them: a status, a type, the field, a code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grpc
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from quire.services.errors import InvalidArgument, ServiceError

_STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The fields of quire.v1 that have another name here.
_FIELDS: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "stopping.stop_strings": "stop",
    "sampling.beam.width": "n",
    "format.json_schema": "response_format",
    "format.regex": "structured_outputs.regex",
    "format.grammar": "structured_outputs.grammar",
}
_MAX_FIELD_CHARS = 100
_Place = tuple[int | str, ...]
"""Members' names and places in lists, from the body inwards."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the request that is to blame."""
    code: str | None
    """A constant that programs may match."""


class ErrorBody(BaseModel):
    """The body of an answer that is not a success."""

    error: ErrorDetail


class HttpError(NamedTuple):
    """A status, its body, and when a retry makes sense."""

    status: int
    body: ErrorBody
    retry_after_seconds: float | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What to show; when to come back, in seconds and in milliseconds, which OpenAI's clients prefer."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_seconds is None:
            return {}
        return {
            "Retry-After": str(math.ceil(self.retry_after_seconds)),
            "Retry-After-Ms": str(round(self.retry_after_seconds * 1000)),
        }


def http_error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> HttpError:
    """Return an error of this protocol's own."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return HttpError(status, ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)))


def from_service_error(error: ServiceError) -> HttpError:
    """Return the error of a service; fields get the names that they have here."""
    message, param = error.message, error.metadata.get("field")
    if isinstance(error, InvalidArgument):
        param = field_name(error.field)
        message = f"{param}: {error.problem}"
    status = _STATUS.get(error.code, 500)
    return http_error(status, message, param=param, code=error.reason.lower())._replace(
        retry_after_seconds=error.retry_after_seconds
    )


def field_name(field: str) -> str:
    """Return the name that a field of ``quire.v1`` has in this API."""
    name, bracket, index = field.partition("[")
    if name in _FIELDS:
        return _FIELDS[name] + bracket + index
    for group in ("sampling.", "stopping.", "response.", "chat."):
        field = field.removeprefix(group)
    return field


def invalid_body(error: ValidationError, body: bytes) -> InvalidArgument:
    """Return the first thing that is wrong with a body, with all that its field may be instead.

    Where a field may be of several kinds, the kind that fits best is taken for what was meant.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if not first["loc"]:
        return InvalidArgument("body", first["msg"], reason="INVALID_JSON")
    value = from_json(body)
    by_kind: dict[_Place, list[tuple[_Place, str]]] = {}
    for each in errors:
        if each["loc"][0] == first["loc"][0]:
            path, kind = _located(each["loc"], value, is_missing=each["type"] == "missing")
            by_kind.setdefault(kind, []).append((path, _problem(each["type"], each["msg"])))
    fits = {kind: _fit(kind, problems) for kind, problems in by_kind.items()}
    best = [problem for kind, fit in fits.items() if fit == min(fits.values()) for problem in by_kind[kind]]
    field, _ = max(best, key=lambda each: len(each[0]))
    problems = dict.fromkeys(problem for path, problem in best if path == field)
    return InvalidArgument(".".join(map(str, field))[:_MAX_FIELD_CHARS], "; or ".join(problems))


def _located(loc: _Place, value: Any, *, is_missing: bool) -> tuple[_Place, _Place]:
    """Return where an error is in a body, and the kinds that pydantic tried on the way."""
    path: list[int | str] = []
    kind: list[int | str] = []
    for at, part in enumerate(loc):
        is_absent = is_missing and at + 1 == len(loc)
        if isinstance(part, int) and isinstance(value, list):
            value = value[part]
        elif isinstance(value, dict) and (part in value or is_absent):
            value = value.get(part)
        else:
            kind.append(part)
            continue
        path.append(part)
    return tuple(path), tuple(kind)


def _fit(kind: _Place, problems: Sequence[tuple[_Place, str]]) -> tuple[bool, int, int]:
    """Return how badly a kind fits: least if there is no other, then if wrong deepest, then least often."""
    return bool(kind), -max(len(path) for path, _ in problems), len(problems)


def _problem(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "is not a field of this API, or not supported; docs/openai.md lists those that are"
    return message[:1].lower() + message[1:]
