"""Schemas of tools that would cost far more than their size, or that are malformed."""

from __future__ import annotations

from typing import Any

import pytest

from quire.tokenization.answers.argument_grammar import UnsupportedSchemaError
from quire.tokenization.answers.arguments import parameter_types
from quire.tokenization.answers.call_grammar import CallRules, Tool, call_grammar
from quire.tokenization.answers.formats import LLAMA_PYTHON, QWEN_CODER, AnswerFormat, CallFormat


def test_references_to_themselves_are_followed_once() -> None:
    # Following each of them eight times deep would take 200 to the power of 4 steps.
    choices: list[dict[str, Any]] = [{"$ref": "#/properties/a"}] * 200
    schema = {"properties": {"a": {"anyOf": [*choices, {"type": "integer"}]}}}
    assert parameter_types(schema, "a") == {"integer"}


def test_the_grammar_of_nested_objects_grows_with_their_depth() -> None:
    def length(depth: int) -> int:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
            schema = {"type": "object", "properties": {"a": {"type": "null"}, "b": schema}}
        rules = CallRules([Tool("search", schema, is_strict=True)], must_call=True)
        grammar = call_grammar(AnswerFormat(calls=LLAMA_PYTHON), rules, {}, in_reasoning=False)
        assert grammar is not None
        return len(grammar)

    assert length(8) < 3 * length(4)


@pytest.mark.parametrize("calls", [LLAMA_PYTHON, QWEN_CODER])
@pytest.mark.parametrize(
    "schema", [{"properties": {"a": True}}, {"properties": []}, {"required": 5, "properties": {"a": {}}}]
)
def test_a_schema_that_no_grammar_can_express_is_refused_only_if_it_is_strict(
    calls: CallFormat, schema: dict[str, Any]
) -> None:
    def grammar(is_strict: bool) -> str | None:
        rules = CallRules([Tool("search", schema, is_strict)], must_call=True)
        return call_grammar(AnswerFormat(calls=calls), rules, {}, in_reasoning=False)

    assert grammar(is_strict=False)
    with pytest.raises(UnsupportedSchemaError, match="search: its schema is malformed"):
        grammar(is_strict=True)
