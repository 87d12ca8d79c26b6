"""Errors as OpenAI's clients read them: the status, the field as it was sent, and when to try again."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from quire.rpc.errors import REQUEST_FAILED, SUSPECTED, Internal, InvalidArgument, ServiceError, Unavailable
from quire.services.router.http.anthropic.requests import MessagesRequest
from quire.services.router.http.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.shared.errors import (
    field_name,
    from_service_error,
    http_error,
    in_anthropic_form,
    invalid_body,
)


def kinds(of: type[ServiceError] = ServiceError) -> set[type[ServiceError]]:
    """Return a kind of errors with all those that are kinds of it."""
    return {of}.union(*(kinds(each) for each in of.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(kinds() - {InvalidArgument}, key=str))
def test_every_error_of_the_service_has_a_status(kind: type[ServiceError]) -> None:
    error = from_service_error(kind("scripted"))
    assert 400 <= error.status < 600
    detail = error.body.error
    assert (detail.message, detail.code) == ("scripted", kind("scripted").reason.lower())
    is_servers = kind.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.OUT_OF_RANGE)
    assert (error.status == 500) == is_servers
    assert (detail.type == "server_error") == (error.status in (500, 501))


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("text", "prompt"),
        ("token_ids.ids[3]", "prompt[3]"),
        ("chat.messages", "messages"),
        ("chat.tools", "tools"),
        ("chat.messages[1].more", "messages[1]"),
        ("stopping.stop_strings[2]", "stop[2]"),
        ("stopping.max_tokens", "max_tokens"),
        ("sampling.logit_bias[7]", "logit_bias[7]"),
        ("sampling.beam.width", "n"),
        ("response.logprobs", "logprobs"),
        ("format.regex", "structured_outputs.regex"),
        ("request_id", "request_id"),
    ],
)
def test_fields_have_the_names_that_clients_send(field: str, name: str) -> None:
    assert field_name(field) == name
    error = from_service_error(InvalidArgument(field, "must be more than stopping.min_tokens"))
    assert error.body.error.param == name
    assert error.body.error.message == f"{name}: must be more than min_tokens"
    assert error.status == 400


@given(seconds=st.floats(0, 120))
def test_retry_after_is_rounded_up(seconds: float) -> None:
    headers = from_service_error(Unavailable("later", retry_after_seconds=seconds)).headers
    assert int(headers["Retry-After"]) >= seconds > int(headers["Retry-After"]) - 1 or seconds == 0
    assert abs(int(headers["Retry-After-Ms"]) - 1000 * seconds) <= 0.5


def test_retry_after_is_at_most_two_minutes() -> None:
    headers = from_service_error(Unavailable("later", retry_after_seconds=3600)).headers
    assert headers == {"Retry-After": "120", "Retry-After-Ms": "120000"}


def test_headers_of_authentication_and_of_useless_retries() -> None:
    assert http_error(401, "who?").headers == {"WWW-Authenticate": "Bearer"}
    assert http_error(500, "a defect").headers == {}
    for reason in (REQUEST_FAILED, SUSPECTED):
        error = from_service_error(Internal("again", reason=reason, retry_after_seconds=1.0))
        assert error.headers == {"X-Should-Retry": "false"}, "OpenAI's clients would repeat a 500"


@pytest.mark.parametrize(("status", "kind"), [(500, "api_error"), (400, "invalid_request_error")])
def test_anthropics_form_has_its_own_name_for_a_servers_error(status: int, kind: str) -> None:
    body = in_anthropic_form(http_error(status, "so"), "r")
    assert (body.type, body.error.type, body.error.message, body.request_id) == ("error", kind, "so", "r")
    assert "details" not in body.error.model_fields_set


def test_a_refused_thread_is_named_as_anthropics_tool_runners_expect() -> None:
    body = in_anthropic_form(http_error(400, "unknown", param="thread"), "r")
    assert body.model_dump(exclude_unset=True)["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ResponseRequest, {"input": [1] * 9999}, "input.0"),
        (DetokenizeRequest, {"tokens": [2, *[1.5] * 9999]}, "tokens.1"),
        (CompletionRequest, {"prompt": [[1], *[["a"]] * 200]}, "prompt.1.0"),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": [1] * 99}]},
            "messages.0.content.0",
        ),
        (
            MessagesRequest,
            {"model": "m", "max_tokens": 1, "messages": [{"role": "x"}] * 9999},
            "messages.0.role",
        ),
    ],
)
def test_only_the_first_wrong_item_of_a_list_is_reported(
    kind: type[BaseModel], body: dict[str, Any], field: str
) -> None:
    text = json.dumps(body)
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(text)
    # Collecting an error for each item blocked the event loop for seconds.
    assert caught.value.error_count() < 20
    assert invalid_body(caught.value, text.encode()).field == field


def test_a_long_name_is_cut() -> None:
    body = f'{{"prompt":"a","{"x" * 5000}":1}}'
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate_json(body)
    assert len(invalid_body(caught.value, body.encode()).field) == 100
