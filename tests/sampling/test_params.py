"""The parameters of a request: values that contradict each other, and what follows from them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import llm
from quire.protos import inference_pb2 as pb
from quire.sampling.parameter import ParameterError, table
from quire.sampling.params import (
    GREEDY_BELOW,
    MAX_SEQUENCES,
    BeamParams,
    EarlyStopping,
    ResponseOptions,
    SamplingParams,
    check_best_of,
)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"min_tokens": 3, "max_tokens": 2}, "stopping.min_tokens"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "sampling.logit_bias"),
        ({"logit_bias": ((7, 101.0),)}, "sampling.logit_bias[7]"),
        ({"stop_token_ids": frozenset(range(1025))}, "stopping.stop_token_ids"),
        ({"bad_words": ((5,), ())}, "sampling.bad_word_token_ids"),
        ({"beam": BeamParams(2), "n": 2}, "sampling.n"),
        ({"beam": BeamParams(2), "kv_budget_tokens": 64}, "sampling.kv_budget_tokens"),
        ({"max_tokens": 0}, "stopping.max_tokens"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"n": MAX_SEQUENCES + 1}, "sampling.n"),
    ],
)
def test_contradictions_and_limits_are_refused_by_name(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**wrong)
    assert caught.value.field == field


def test_the_limits_themselves_are_allowed() -> None:
    SamplingParams(max_tokens=2, min_tokens=2, seed=2**64 - 1, n=MAX_SEQUENCES)
    SamplingParams(stop_token_ids=frozenset(range(1024)))


@pytest.mark.parametrize(
    ("change", "is_penalized", "changes_logits"),
    [
        ({}, False, False),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9}, False, False),
        ({"presence_penalty": 0.5}, True, True),
        ({"frequency_penalty": -0.5}, True, True),
        ({"repetition_penalty": 1.1}, True, True),
        ({"min_tokens": 1}, False, True),
        ({"logit_bias": ((5, 1.0),)}, False, True),
        ({"allowed_token_ids": frozenset({5})}, False, True),
        ({"bad_words": ((5,),)}, False, True),
    ],
)
def test_parameters_that_change_the_logits_are_known(
    change: dict[str, Any], is_penalized: bool, changes_logits: bool
) -> None:
    params = SamplingParams(**change)
    assert (params.is_penalized, params.changes_logits) == (is_penalized, changes_logits)


def test_a_temperature_near_zero_is_greedy() -> None:
    temperatures = (0.0, GREEDY_BELOW / 2, GREEDY_BELOW, 1.0)
    assert [SamplingParams(temperature=each).is_greedy for each in temperatures] == [True, True, False, False]


def test_a_beam_search_decodes_as_many_sequences_as_it_is_wide() -> None:
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(beam=BeamParams(4)).num_sequences == 4


@given(logprob=st.floats(-1e6, 0), length=st.integers(1, 1 << 20), penalty=st.floats(-10, 10))
def test_a_score_gives_its_logprob_back(logprob: float, length: int, penalty: float) -> None:
    beam = BeamParams(2, penalty)
    assert beam.logprob(beam.score(logprob, length), length) == pytest.approx(logprob)


@given(length=st.integers(2, 1000), penalty=st.floats(0.1, 10))
def test_a_length_penalty_above_zero_prefers_the_longer_of_equal_answers(length: int, penalty: float) -> None:
    assert BeamParams(2, penalty).score(-5.0, length) > BeamParams(2, penalty).score(-5.0, length - 1)
    assert BeamParams(2, -penalty).score(-5.0, length) < BeamParams(2, -penalty).score(-5.0, length - 1)


def test_early_stopping_has_three_values() -> None:
    for value in get_args(EarlyStopping):
        BeamParams(2, early_stopping=value)
    wrong: Any = "always"
    with pytest.raises(ParameterError, match="must be True, False or 'never'; got 'always'"):
        BeamParams(2, early_stopping=wrong)


def test_no_more_answers_are_returned_than_sampled() -> None:
    check_best_of(3, 3)
    check_best_of(1, MAX_SEQUENCES)
    for num_answers, best_of in ((3, 2), (1, MAX_SEQUENCES + 1)):
        with pytest.raises(ParameterError, match=f"must be from n = {num_answers} to {MAX_SEQUENCES}"):
            check_best_of(num_answers, best_of)


# --- the table ------------------------------------------------------------------------------------------

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


def test_every_parameter_is_one_of_the_offline_interface() -> None:
    names = {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}
    offline = {field.name for field in fields(llm.SamplingParams)}
    assert {names.get(name, name) for name in table(SamplingParams)} - offline == {"beam"}
