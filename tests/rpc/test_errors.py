"""The errors of services: what is sent of them, and what of a client's text they repeat."""

from __future__ import annotations

import pickle

import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from quire.rpc.errors import (
    ERROR_DOMAIN,
    MAX_MESSAGE_CHARS,
    MAX_VALUE_CHARS,
    InvalidArgument,
    ServiceError,
    Unavailable,
    quoted,
    shortened,
    to_status,
)
from quire.sampling.parameter import ParameterError
from quire.services.server.parameters import parameters_checked

KINDS: list[type[ServiceError]] = ServiceError.__subclasses__()


def test_each_kind_has_a_code_of_its_own() -> None:
    assert len({kind.code for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", [ServiceError, *(kind for kind in KINDS if kind is not InvalidArgument)])
def test_an_error_survives_a_pipe(kind: type[ServiceError]) -> None:
    error = kind("scripted", reason="X", metadata={"limit": "1"}, retry_after_seconds=2.0)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)


@given(text=st.text(max_size=2 * MAX_MESSAGE_CHARS))
def test_an_error_is_short_however_long_the_clients_text_is(text: str) -> None:
    error = InvalidArgument("f" * 3000, text * 20, metadata={"value": text * 20})
    assert len(error.message) <= MAX_MESSAGE_CHARS + 1
    assert to_status(error).ByteSize() < 16 * MAX_MESSAGE_CHARS + 1000
    assert len(shortened(text)) <= MAX_VALUE_CHARS + 1
    assert shortened(text) == text or (len(text) > MAX_VALUE_CHARS and text.startswith(shortened(text)[:-1]))
    assert "\n" not in quoted(text)


def test_the_status_has_the_reason_the_delay_and_the_field() -> None:
    status = to_status(Unavailable("later", metadata={"limit": "3"}, retry_after_seconds=1.5))
    assert (status.code, status.message) == (14, "later")
    info, retry = ErrorInfo(), RetryInfo()
    assert [status.details[0].Unpack(info), status.details[1].Unpack(retry)] == [True, True]
    assert (info.reason, info.domain, dict(info.metadata)) == ("UNAVAILABLE", ERROR_DOMAIN, {"limit": "3"})
    assert retry.retry_delay.ToMilliseconds() == 1500
    refused, violations = to_status(InvalidArgument("n", "must be 1")), BadRequest()
    assert refused.details[-1].Unpack(violations)
    assert [(each.field, each.description) for each in violations.field_violations] == [("n", "must be 1")]


@pytest.mark.parametrize(
    ("field", "renamed"),
    [("text", "prompt"), ("text[3]", "prompt[3]"), ("texts", "texts"), ("a.text", "a.text")],
)
def test_a_renamed_field_keeps_its_index_and_the_rest_of_the_error(field: str, renamed: str) -> None:
    error = InvalidArgument(field, "is wrong", reason="WRONG", metadata={"limit": "3"})
    other = error.renamed({"text": "prompt"})
    assert (other.field, other.message, other.reason) == (renamed, f"{renamed}: is wrong", "WRONG")
    assert other.metadata == {"field": renamed, "limit": "3"}


@pytest.mark.parametrize(("limit", "metadata"), [("2", {"limit": "2"}), (None, {})])
def test_a_parameters_error_becomes_a_status(limit: str | None, metadata: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument) as caught, parameters_checked():
        raise ParameterError("sampling.top_p", "must be at most 2; got 3", limit)
    error = caught.value
    assert (error.field, error.problem) == ("sampling.top_p", "must be at most 2; got 3")
    assert error.metadata == {"field": "sampling.top_p", **metadata}
