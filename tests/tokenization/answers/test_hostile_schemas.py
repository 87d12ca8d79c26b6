"""Schemas of tools that would cost far more than their size, or that are malformed."""

from __future__ import annotations

from typing import Any

from quire.tokenization.answers.arguments import parameter_types
from quire.tokenization.answers.call_grammar import CallRules, Tool, call_grammar
from quire.tokenization.answers.formats import LLAMA_PYTHON, AnswerFormat


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
