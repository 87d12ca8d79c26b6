"""Parameters on their way through messages: none is lost, and none is invented."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.sampling.messages import format_from_proto, from_proto, to_proto, values_from_proto
from quire.sampling.output_format import OutputFormat
from quire.sampling.parameter import ParameterError, Range, table
from quire.sampling.params import BeamParams, ResponseOptions, SamplingParams

token_ids = st.integers(0, 2**32 - 1)


def numbers(name: str, kind: type = SamplingParams) -> st.SearchStrategy[float]:
    """Return numbers in a parameter's range that single precision has too, as some fields have it."""
    limits = table(kind)[name].parameter.range
    assert isinstance(limits, Range)
    low, high = (struct.unpack("f", struct.pack("f", end))[0] for end in (limits.low, limits.high))
    values = st.floats(low, high, width=32, exclude_min=limits.excludes_low or low < limits.low)
    return values.filter(lambda value: value in limits)


beams = st.builds(
    BeamParams,
    st.integers(2, 64),
    numbers("length_penalty", BeamParams),
    st.sampled_from([True, False, "never"]),
)
FLOATS = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@st.composite
def some_params(draw: st.DrawFn) -> SamplingParams:
    max_tokens = draw(st.integers(1, 2**31 - 1))
    beam = draw(st.none() | beams)
    return SamplingParams(
        **{name: draw(numbers(name)) for name in FLOATS},
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.frozensets(token_ids, max_size=4)),
        ignore_eos=draw(st.booleans()),
        top_k=draw(st.integers(0, 2**31 - 1)),
        seed=draw(st.integers(0, 2**64 - 1)),
        n=1 if beam else draw(st.integers(1, 64)),
        beam=beam,
        logit_bias=tuple(draw(st.dictionaries(token_ids, numbers("logit_bias"), max_size=4)).items()),
        allowed_token_ids=draw(st.frozensets(token_ids, max_size=4)),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3)))),
        kv_budget_tokens=None if beam else draw(st.none() | st.integers(1, 2**31 - 1)),
        num_logprobs=draw(st.none() | st.integers(0, 20)),
        num_prompt_logprobs=draw(st.none() | st.integers(0, 20)),
    )


@settings(max_examples=40)
@given(params=some_params())
def test_a_worker_gets_the_parameters_that_the_router_has(params: SamplingParams) -> None:
    sent = worker_pb2.Sequence.FromString(to_proto(params, None).SerializeToString())
    read = from_proto(sent)
    # A map of a message has no order.
    assert dict(read.logit_bias) == dict(params.logit_bias)
    assert to_proto(read, None) == sent
    for name in set(table(SamplingParams)) - {"logit_bias"}:
        assert getattr(read, name) == getattr(params, name), name


def test_a_message_without_parameters_has_the_defaults() -> None:
    assert from_proto(worker_pb2.Sequence()) == SamplingParams()


def test_only_fields_that_are_set_are_values() -> None:
    generation = pb.Generation(
        sampling=pb.SamplingParams(temperature=0.0, seed=0), response=pb.ResponseOptions(logprobs=0)
    )
    assert values_from_proto(SamplingParams, pb.Generation()) == {}
    assert values_from_proto(SamplingParams, generation) == {"temperature": 0.0, "seed": 0, "num_logprobs": 0}
    assert values_from_proto(ResponseOptions, generation) == {"logprobs": 0}


def test_an_enumeration_of_a_newer_version_is_refused_by_name() -> None:
    beam = pb.BeamParams(width=2)
    beam.early_stopping = 99  # type: ignore[assignment]
    with pytest.raises(ParameterError, match="must be one of EARLY_STOPPING_UNSPECIFIED") as caught:
        values_from_proto(SamplingParams, pb.Generation(sampling=pb.SamplingParams(beam=beam)))
    assert caught.value.field == "sampling.beam.early_stopping"


def test_a_list_that_repeats_a_token_is_as_long_as_it_was_sent() -> None:
    sequence = worker_pb2.Sequence(stopping=pb.StoppingParams(stop_token_ids=[7] * 1025))
    with pytest.raises(ParameterError, match="stop_token_ids must be at most 1024; got 1025"):
        from_proto(sequence)


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
@pytest.mark.parametrize("text", ["", "x"])
def test_a_format_keeps_its_kind_even_if_it_is_empty(kind: Any, text: str) -> None:
    output_format = OutputFormat(kind, text)
    assert format_from_proto(to_proto(SamplingParams(), output_format).format) == output_format
    assert format_from_proto(pb.ResponseFormat()) is None
