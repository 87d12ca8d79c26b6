"""Builds errors in the forms that OpenAI's and Anthropic's clients read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import grpc
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from quire.rpc.errors import REQUEST_FAILED, SUSPECTED, InvalidArgument, ServiceError, shortened

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
    409: "conflict_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Fields of quire.v1 that have another name in the HTTP API.
_FIELDS: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.tools": "tools",
    "chat.tool_choice": "tool_choice",
    "chat.tool_choice.names": "tool_choice",
    "chat.template_arguments": "chat_template_kwargs",
    "stopping.stop_strings": "stop",
    "sampling.beam": "use_beam_search",
    "sampling.beam.width": "n",
    "sampling.beam.length_penalty": "length_penalty",
    "format.json_schema": "response_format",
    "format.regex": "structured_outputs.regex",
    "format.grammar": "structured_outputs.grammar",
}
_FIELD_OF_QUIRE = re.compile(r"\b(?:sampling|stopping|response|format|chat)(?:\.[a-z_]+)+")
ANTHROPIC_PATH = "/v1/messages"
"""Path of Anthropic's API, whose errors have a form of their own."""
# Reasons of requests that would fail again: both clients repeat a 500 unless they are told not to.
_FINAL = frozenset({REQUEST_FAILED.lower(), SUSPECTED.lower()})
_MAX_FIELD_CHARS = 100
MAX_RETRY_AFTER_SECONDS = 120.0
"""OpenAI's clients do not try again if they are told to wait longer; Anthropic's would wait all the time."""
_Place = tuple[int | str, ...]
"""Names of members and indices in lists that lead from the body to a value."""


class _Problem(NamedTuple):
    path: _Place
    message: str
    is_of_type: bool


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    """The field of the request that caused the error."""
    code: str | None
    """A constant that programs may match."""


class ErrorBody(BaseModel):
    """The body of an error response."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """Description of an error, in the form of Anthropic's API."""

    type: str
    message: str
    details: dict[str, Any] | None = None
    """What Anthropic's SDKs read to send a refused request in another way."""


class AnthropicErrorBody(BaseModel):
    """An error for a client that expects Anthropic's API; in a stream its name is its type."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class HttpError(NamedTuple):
    """An error response.

    Attributes:
        body: the body in OpenAI's form.
        retry_after_seconds: time after which a retry makes sense.
        metadata: limits and values, by name.
    """

    status: int
    body: ErrorBody
    retry_after_seconds: float | None = None
    metadata: Mapping[str, str] = MappingProxyType({})

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response: how to authenticate, not to retry, or when to retry.

        The time of a retry is given in seconds and in milliseconds, which OpenAI's clients prefer.
        """
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.body.error.code in _FINAL:
            return {"X-Should-Retry": "false"}
        if self.retry_after_seconds is None:
            return {}
        seconds = min(self.retry_after_seconds, MAX_RETRY_AFTER_SECONDS)
        return {"Retry-After": str(math.ceil(seconds)), "Retry-After-Ms": str(round(seconds * 1000))}


def http_error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> HttpError:
    """Return an error with a given HTTP status; the status determines its type."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return HttpError(status, ErrorBody(error=ErrorDetail(message=message, type=kind, param=param, code=code)))


def in_anthropic_form(error: HttpError, request_id: str) -> AnthropicErrorBody:
    """Return an error under ``ANTHROPIC_PATH``: the body of its response, or the last event of a stream."""
    detail, message = error.body.error, error.body.error.message
    if "num_tokens" in error.metadata:
        # Claude Code looks for these words, and then shortens the conversation by itself.
        message = "prompt is too long: {num_tokens} tokens > {limit} maximum".format_map(error.metadata)
    kind = "api_error" if detail.type == "server_error" else detail.type
    written = AnthropicErrorDetail(type=kind, message=message)
    if detail.param == "thread":
        # The SDKs' tool runners then send whole conversations.
        written.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return AnthropicErrorBody(type="error", error=written, request_id=request_id)


def from_service_error(error: ServiceError) -> HttpError:
    """Return a service's error as an HTTP error, with fields under their names in this API."""
    message, param = error.message, error.metadata.get("field")
    if isinstance(error, InvalidArgument):
        param = field_name(error.field)
        problem = _FIELD_OF_QUIRE.sub(lambda found: field_name(found[0]), error.problem)
        message = f"{param}: {problem}"
    status = _STATUS.get(error.code, 500)
    return http_error(status, message, param=param, code=error.reason.lower())._replace(
        retry_after_seconds=error.retry_after_seconds, metadata=error.metadata
    )


def field_name(field: str) -> str:
    """Return the name that a field of ``quire.v1`` has in this API."""
    name, bracket, index = field.partition("[")
    if name in _FIELDS:
        return _FIELDS[name] + bracket + index
    for group in ("sampling.", "stopping.", "response.", "chat."):
        field = field.removeprefix(group)
    # Clients do not know that a message's reasoning and tool calls are further members of it.
    return field.removesuffix(".more")


def invalid_body(error: ValidationError, body: bytes) -> InvalidArgument:
    """Return the error of the first invalid field of a body, with all alternatives that its field allows.

    If a field may be of several kinds, the kind that fits best is assumed to be what the client meant.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    first = errors[0]
    if not first["loc"]:
        return InvalidArgument("body", first["msg"], reason="INVALID_JSON")
    value = from_json(body)
    by_kind: dict[_Place, list[_Problem]] = {}
    for each in errors:
        if each["loc"][0] == first["loc"][0]:
            path, kind = _located(each["loc"], value, is_missing=each["type"] == "missing")
            problem = _Problem(path, _describe(each["type"], each["msg"]), each["type"].endswith("_type"))
            by_kind.setdefault(kind, []).append(problem)
    fits = {kind: _fit(kind, problems) for kind, problems in by_kind.items()}
    best = [problem for kind, fit in fits.items() if fit == min(fits.values()) for problem in by_kind[kind]]
    field = max((each.path for each in best), key=len)
    problems = dict.fromkeys(each.message for each in best if each.path == field)
    return InvalidArgument(".".join(map(str, field))[:_MAX_FIELD_CHARS], "; or ".join(problems))


def _located(loc: _Place, value: Any, *, is_missing: bool) -> tuple[_Place, _Place]:
    """Return the path of an error in a body, and the kinds that pydantic tried on the way."""
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


def _fit(kind: _Place, problems: Sequence[_Problem]) -> tuple[bool, bool, int, list[int], int]:
    """Return a key by which kinds are ordered, the best fit first.

    A field without alternative kinds fits best. Next come kinds with a broken limit but no wrong type, then
    kinds whose deepest problem is deeper, then kinds whose first wrong item is later in its list, then kinds
    with fewer problems.
    """
    has_wrong_type = any(each.is_of_type for each in problems)
    depth = max(len(each.path) for each in problems)
    right_items = [-part for part in problems[0].path if isinstance(part, int)]
    return bool(kind), has_wrong_type, -depth, right_items, len(problems)


def _describe(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "is not a field of this API, or not supported; its page in docs/ lists those that are"
    return shortened(message[:1].lower() + message[1:])
