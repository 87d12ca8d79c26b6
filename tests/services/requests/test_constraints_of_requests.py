"""Penalties, biases and bans of a request: every limit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.sampling.output_format import OutputFormat
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import validate


def request(**sampling: Any) -> pb.Generation:
    return pb.Generation(text="hello", sampling=pb.SamplingParams(**sampling))


@pytest.mark.parametrize(
    ("sampling", "field", "problem"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2; got 2.5"),
        ({"frequency_penalty": math.nan}, "frequency_penalty", "got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "from 0.01 to 100; got 0"),
        ({"repetition_penalty": 100.5}, "repetition_penalty", "got 100.5"),
        ({"logit_bias": {320: 1.0}}, "logit_bias", "below 320; got 320"),
        ({"logit_bias": {7: 101.0}}, "logit_bias[7]", "from -100 to 100; got 101"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "at most 1024; got 1025"),
        ({"allowed_token_ids": [3, 320]}, "allowed_token_ids", "below 320; got 320"),
        ({"bad_words": ["x"] * 129}, "bad_words", "at most 128; got 129"),
    ],
)
async def test_limits(sampling: dict[str, Any], field: str, problem: str, model: ServedModel) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await validate(request(**sampling), model)
    assert caught.value.field == f"sampling.{field}"
    assert problem in caught.value.problem


@pytest.mark.parametrize("penalty", [0.01, 100.0])
async def test_the_limits_themselves_are_allowed(penalty: float, model: ServedModel) -> None:
    validated = await validate(request(repetition_penalty=penalty), model)
    assert validated.params.repetition_penalty == pytest.approx(penalty)


async def test_unset_parameters_change_no_logits(model: ServedModel) -> None:
    assert not (await validate(request(), model)).params.changes_logits


async def test_prompt_logprobs_are_limited(model: ServedModel) -> None:
    too_many = pb.Generation(text="hello", response=pb.ResponseOptions(prompt_logprobs=21))
    with pytest.raises(InvalidArgument, match=r"response\.prompt_logprobs: must be from 0 to 20; got 21"):
        await validate(too_many, model)
    assert (await validate(request(), model)).response.prompt_logprobs is None


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (pb.Generation(text="x", format=pb.ResponseFormat(regex="")), "format.regex"),
        (pb.Generation(text="x", format=pb.ResponseFormat(grammar="x" * 65537)), "format.grammar"),
        (
            pb.Generation(
                text="x",
                format=pb.ResponseFormat(json_schema="{}"),
                stopping=pb.StoppingParams(ignore_eos=True),
            ),
            "stopping.ignore_eos",
        ),
    ],
)
async def test_formats_are_limited(generation: pb.Generation, field: str, model: ServedModel) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await validate(generation, model)
    assert caught.value.field == field


async def test_a_format_is_passed_on(model: ServedModel) -> None:
    wanted = pb.ResponseFormat(json_schema='{"type": "integer"}')
    valid = await validate(pb.Generation(text="x", format=wanted), model)
    assert valid.format == OutputFormat("json_schema", '{"type": "integer"}')
