"""The table of parameters, and the way to the worker's message and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from quire import llm
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.sampling.constraints import check_vocabulary, contradiction
from quire.sampling.messages import format_from_proto, from_proto, to_proto
from quire.sampling.output_format import OutputFormat, choice_format
from quire.sampling.parameter import ParameterError, table
from quire.sampling.params import BeamParams, ResponseOptions, SamplingParams

KINDS = (SamplingParams, BeamParams, ResponseOptions)


def test_every_default_is_in_its_range() -> None:
    for kind in KINDS:
        for entry in table(kind).values():
            if isinstance(entry.default, int | float):
                entry.parameter.check(entry.default)


def test_every_path_is_a_field() -> None:
    for kind in KINDS:
        for entry in table(kind).values():
            message: Any = pb.Generation()
            *groups, field = entry.parameter.path.split(".")
            for group in groups:
                message = getattr(message, group)
            assert field in message.DESCRIPTOR.fields_by_name, entry


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            max_tokens=30,
            min_tokens=2,
            stop_token_ids=frozenset({3, 4}),
            ignore_eos=True,
            temperature=0.5,
            top_p=0.25,
            top_k=5,
            min_p=0.125,
            typical_p=0.75,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.5,
            seed=2**64 - 1,
            n=3,
            logit_bias=((5, 0.5), (6, -100.0)),
            allowed_token_ids=frozenset({5, 6}),
            bad_words=((5,), (6, 7)),
            kv_budget_tokens=64,
            num_logprobs=0,
            num_prompt_logprobs=2,
        ),
        SamplingParams(beam=BeamParams(2)),
        SamplingParams(beam=BeamParams(3, 0.5, "never")),
        SamplingParams(beam=BeamParams(3, early_stopping=True)),
    ],
)
def test_params_survive_the_way_to_a_worker(params: SamplingParams) -> None:
    assert from_proto(to_proto(params, None)) == params


def test_a_message_without_parameters_has_the_defaults() -> None:
    assert from_proto(worker_pb2.Sequence()) == SamplingParams()


def test_a_format_survives_the_way_to_a_worker() -> None:
    for output_format in (OutputFormat("regex", "a+"), choice_format(["yes", 'a "b"', "🙂"]), None):
        assert format_from_proto(to_proto(SamplingParams(), output_format).format) == output_format


def test_every_parameter_is_one_of_the_offline_interface() -> None:
    names = {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}
    offline = {field.name for field in fields(llm.SamplingParams)}
    assert {names.get(name, name) for name in table(SamplingParams)} - offline == {"beam"}


def test_contradictions_are_found_in_order() -> None:
    allowed = SamplingParams(allowed_token_ids=frozenset({1, 2}))
    assert contradiction(allowed, {1}, 10) is None
    banned = SamplingParams(allowed_token_ids=frozenset({1}), bad_words=((1,),))
    assert contradiction(banned, set(), 10) == "bad_words"
    ending = SamplingParams(allowed_token_ids=frozenset({1}), min_tokens=1)
    assert contradiction(ending, {1}, 10) == "min_tokens"
    assert contradiction(SamplingParams(bad_words=tuple((i,) for i in range(10))), set(), 10) == "bad_words"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias=((10, 1.0),)), "sampling.logit_bias"),
        (SamplingParams(allowed_token_ids=frozenset({10})), "sampling.allowed_token_ids"),
        (SamplingParams(bad_words=((1, 10),)), "sampling.bad_word_token_ids"),
        (SamplingParams(stop_token_ids=frozenset({10})), "stopping.stop_token_ids"),
    ],
)
def test_tokens_outside_the_vocabulary_are_named(params: SamplingParams, field: str) -> None:
    with pytest.raises(ParameterError, match="must be below 10; got 10") as caught:
        check_vocabulary(params, 10)
    assert caught.value.field == field
