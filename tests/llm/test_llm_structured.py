"""Answers in LLM that have the form that was asked for."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from quire.engine.structured_output.grammar import StructuredOutputUnavailableError
from quire.llm import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 22, 333]}, "name": {"type": "string", "maxLength": 5}},
    "required": ["size", "name"],
    "additionalProperties": False,
}
CHOICES = ["yes", 'n"o\\', "peut-être (?)"]


def answers(llm: LLM, form: StructuredOutputsParams, **params: Any) -> list[str]:
    values = {"max_tokens": 300, "seed": 1, "structured_outputs": form, **params}
    outputs = llm.generate(["the code of", "a lamp"], SamplingParams(**values), use_tqdm=False)
    assert all(answer.finish_reason == "stop" for output in outputs for answer in output.outputs)
    return [answer.text for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_json_schema(tiny: LLM, schema: Any) -> None:
    for text in answers(tiny, StructuredOutputsParams(json=schema), n=3):
        value = json.loads(text)
        assert value["size"] in (1, 22, 333)
        assert len(value["name"]) <= 5


def test_a_regular_expression_and_a_grammar(tiny: LLM) -> None:
    for text in answers(tiny, StructuredOutputsParams(regex="[a-c]{3}-[0-9]{2}")):
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", text)
    for text in answers(tiny, StructuredOutputsParams(grammar='start: "<" /[xy]{1,4}/ ">"')):
        assert re.fullmatch("<[xy]{1,4}>", text)


def test_one_of_several_texts(tiny: LLM) -> None:
    texts = answers(tiny, StructuredOutputsParams(choice=CHOICES), n=8, temperature=50.0)
    assert set(texts) == set(CHOICES)


def test_some_object(tiny: LLM) -> None:
    """A bias towards its end keeps the object short."""
    [[end]] = tiny.tokenizer.encode_batch(["}"], add_special_tokens=False)
    texts = answers(tiny, StructuredOutputsParams(json_object=True), logit_bias={end: 100.0}, n=4)
    assert all(isinstance(json.loads(text), dict) for text in texts)


def test_a_form_for_one_prompt_does_not_change_the_others(tiny: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    form = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes"]), temperature=0)
    [single] = tiny.generate("the", free, use_tqdm=False)
    formed, beside = tiny.generate(["the", "the"], [form, free], use_tqdm=False)
    assert formed.outputs[0].text == "yes"
    assert beside.outputs[0].token_ids == single.outputs[0].token_ids


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "give one of json, regex, choice, grammar, json_object; got none"),
        ({"regex": "a", "json_object": True}, "got regex, json_object"),
        ({"choice": []}, "choice must be texts that are not empty"),
        ({"choice": "yes"}, "choice must be texts"),
    ],
)
def test_forms_that_contradict_themselves(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StructuredOutputsParams(**form)


def test_a_format_that_cannot_be_compiled_is_refused_before_any_request_runs(tiny: LLM) -> None:
    with pytest.raises(ValueError, match=re.escape("sampling_params[1].structured_outputs: ")):
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
        tiny.generate(["a", "b"], [SamplingParams(), bad], use_tqdm=False)
    assert tiny.stats().num_requests == 0
    with pytest.raises(ValueError, match="ignore_eos must be False with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)


def test_the_package_may_be_missing(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    remedy = re.escape("in quire's clone, run .venv/bin/pip install -e '.[structured]'")
    with pytest.raises(StructuredOutputUnavailableError, match=remedy):
        answers(tiny, StructuredOutputsParams(regex="a"))
