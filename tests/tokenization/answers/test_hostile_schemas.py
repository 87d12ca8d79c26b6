"""Schemas of tools that would cost far more than their size, or that are malformed."""

from __future__ import annotations

from typing import Any

from quire.tokenization.answers.arguments import parameter_types


def test_references_to_themselves_are_followed_once() -> None:
    # Following each of them eight times deep would take 200 to the power of 4 steps.
    choices: list[dict[str, Any]] = [{"$ref": "#/properties/a"}] * 200
    schema = {"properties": {"a": {"anyOf": [*choices, {"type": "integer"}]}}}
    assert parameter_types(schema, "a") == {"integer"}
