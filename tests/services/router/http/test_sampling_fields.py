"""The fields of an HTTP request as those of quire.v1: values that differ, and forms that are exclusive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.router.http.openai.sampling_fields import (
    GenerationFields,
    answer_format,
    sampling_params,
    sent_names,
    stopping_params,
)


def fields(**values: Any) -> GenerationFields:
    return GenerationFields.model_validate_json(json.dumps(values))


@given(seed=st.integers(-(1 << 63), (1 << 64) - 1), top_k=st.integers(-1, (1 << 31) - 1))
def test_signed_values_become_unsigned_ones(seed: int, top_k: int) -> None:
    params = sampling_params(fields(seed=seed, top_k=top_k))
    assert params.seed == seed % (1 << 64)
    assert params.top_k == max(top_k, 0)


def test_absent_and_null_fields_are_not_set() -> None:
    for sent in (fields(), fields(top_k=None, seed=None, temperature=None, unknown=None)):
        assert sampling_params(sent) == pb.SamplingParams(n=1)
        assert stopping_params(sent, None) == pb.StoppingParams()
        assert answer_format(sent) is None
    assert sampling_params(fields(temperature=0)).HasField("temperature")


@pytest.mark.parametrize(
    "wrong", [{"unknown": 1}, {"n": "2"}, {"temperature": float("nan")}, {"stop": ["x" * 257]}, {"n": True}]
)
def test_values_of_another_kind_are_not_converted(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        fields(**wrong)


def test_a_beam_search_is_as_wide_as_the_number_of_answers() -> None:
    params = sampling_params(fields(use_beam_search=True, n=3, length_penalty=0.5))
    assert (params.beam.width, params.beam.length_penalty) == (3, 0.5)
    assert not params.HasField("n")
    with pytest.raises(InvalidArgument, match="length_penalty: is for use_beam_search"):
        sampling_params(fields(length_penalty=0.5))


def test_the_best_are_chosen_from_more_answers_than_are_returned() -> None:
    params = sampling_params(fields(n=2), best_of=5)
    assert (params.n, params.best_of) == (2, 5)


def test_one_stop_string_is_a_list_of_one() -> None:
    for stop, expected in ((None, []), ("ab", ["ab"]), (["a", "b"], ["a", "b"])):
        assert list(stopping_params(fields(stop=stop), 7).stop_strings) == expected
    assert stopping_params(fields(max_tokens=3), 7).max_tokens == 7


@pytest.mark.parametrize(
    ("options", "includes", "continues"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"continuous_usage_stats": True}, False, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
)
def test_continuous_usage_needs_a_stream_with_usage(
    options: dict[str, bool] | None, includes: bool, continues: bool
) -> None:
    sent = fields(stream_options=options)
    assert (sent.includes_usage, sent.counts_on) == (includes, continues)


OBJECT = '{"type":"object"}'
SCHEMA = {"type": "array"}


@pytest.mark.parametrize(
    ("sent", "expected", "name"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, pb.ResponseFormat(json_schema=OBJECT), None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            pb.ResponseFormat(json_schema='{"type": "array"}'),
            None,
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            pb.ResponseFormat(json_schema='{"type": "array"}'),
            "json",
        ),
        ({"structured_outputs": {"json": "{}"}}, pb.ResponseFormat(json_schema="{}"), "json"),
        ({"structured_outputs": {"json_object": True}}, pb.ResponseFormat(json_schema=OBJECT), "json_object"),
        ({"structured_outputs": {"regex": "a+"}}, pb.ResponseFormat(regex="a+"), "regex"),
        ({"structured_outputs": {"grammar": "start: A"}}, pb.ResponseFormat(grammar="start: A"), "grammar"),
    ],
)
def test_a_form_is_known_again_by_the_name_that_was_sent(
    sent: dict[str, Any], expected: pb.ResponseFormat | None, name: str | None
) -> None:
    assert answer_format(fields(**sent)) == expected
    names = set(sent_names(fields(**sent)).values())
    assert names == ({f"structured_outputs.{name}"} if name else set())


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"structured_outputs": {}}, "exactly one"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "exactly one"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
            "cannot go with response_format",
        ),
    ],
)
def test_forms_that_exclude_each_other_are_refused(sent: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        answer_format(fields(**sent))
