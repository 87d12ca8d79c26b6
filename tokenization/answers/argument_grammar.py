"""Writes the grammar of a call's arguments, for formats in which they are not one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.tokenization.answers.formats import CallFormat, CallSyntax
from quire.tokenization.answers.lark import Lark, json_value, quoted

Schema = Mapping[str, Any]

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "additionalProperties"}
)
"""Keywords that refuse no value of a property that the schema names."""
_OF_OBJECTS = _NOTES | {"type", "properties", "required"}
_COMMA = r"/, ?/"


class UnsupportedSchemaError(ValueError):
    """A keyword of a strict tool's schema cannot be enforced in the model's format of calls."""


def written_arguments(
    lark: Lark, calls: CallFormat, tool: str, schema: Schema | None, *, is_strict: bool
) -> str:
    """Return the symbols of a call's arguments.

    Args:
        schema: JSON schema of the arguments; None: any arguments.
        is_strict: every keyword of the schema must be enforced.

    Raises:
        UnsupportedSchemaError: names the tool and the keyword.
    """
    if calls.syntax is CallSyntax.JSON_ARGUMENTS:
        return json_value(schema or {"type": "object"}, is_lenient=not is_strict)
    writer = _Parameters(lark, calls) if calls.syntax is CallSyntax.PARAMETERS else _Literals(lark, calls)
    if schema is None:
        return writer.any_arguments()
    try:
        return writer.arguments(schema)
    except (UnsupportedSchemaError, AttributeError, TypeError, RecursionError) as error:
        if is_strict:
            if not isinstance(error, UnsupportedSchemaError):
                error = UnsupportedSchemaError("its schema is malformed, too deep, or has true as a part")
            raise UnsupportedSchemaError(
                f"{tool}: {error}, in the form in which this model writes calls"
            ) from None
        return writer.any_arguments()


def _properties(schema: Schema) -> list[tuple[str, Schema, bool]]:
    """Return name, schema and whether it is required, of each property of an object."""
    _check(schema, _OF_OBJECTS)
    required = schema.get("required", ())
    return [(name, each, name in required) for name, each in schema.get("properties", {}).items()]


def _check(schema: Schema, known: frozenset[str]) -> None:
    if unknown := sorted(schema.keys() - known):
        raise UnsupportedSchemaError(f"the keyword {unknown[0]} of its schema cannot be enforced")


class _Parameters:
    """Arguments as raw text between tags, in the order of the schema."""

    def __init__(self, lark: Lark, calls: CallFormat) -> None:
        self._lark = lark
        self._calls = calls

    def any_arguments(self) -> str:
        calls, lark = self._calls, self._lark
        key = f"{lark.literal(calls.parameter_open)} {lark.until(calls.key_end, 'any_key')}"
        return f"({self._lark.add('any_parameter', f'{key} {self._text()}')})*"

    def arguments(self, schema: Schema) -> str:
        return " ".join(
            self._parameter(name, each) + ("" if is_required else "?")
            for name, each, is_required in _properties(schema)
        )

    def _parameter(self, key: str, schema: Schema) -> str:
        calls, lark = self._calls, self._lark
        value, key_end = self._value(schema), calls.key_end
        if "%json" in value and calls.json_key_end:
            key_end = calls.json_key_end
        return f"({lark.literal(calls.parameter_open + key + key_end)} {value})"

    def _value(self, schema: Schema) -> str:
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types or []
        if "string" not in types and types:
            return f"{json_value(schema, is_lenient=False)} {self._lark.literal(self._calls.value_end)}"
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is None:
            _check(schema, _NOTES | {"type"})
            return self._text()
        if not all(isinstance(value, str) for value in values):
            raise UnsupportedSchemaError("the keyword enum of its schema, with values other than texts,")
        choice = " | ".join(quoted(value) for value in values)
        return f"({choice}) {self._lark.literal(self._calls.value_end)}"

    def _text(self) -> str:
        return self._lark.until(self._calls.value_end, "raw_value")


class _Literals:
    """Arguments as literals: those of Python, or objects with unquoted keys and delimited strings."""

    def __init__(self, lark: Lark, calls: CallFormat) -> None:
        self._is_python = calls.syntax is CallSyntax.PYTHON
        self._lark, self._delimiter = lark, lark.literal(calls.string_delimiter)
        self._words = ("True", "False", "None") if self._is_python else ("true", "false", "null")
        self._string = json_value({"type": "string"}, is_lenient=False)
        if not self._is_python:
            self._string = f"{self._delimiter} {lark.until(calls.string_delimiter, 'any_string')}"

    def any_arguments(self) -> str:
        key, words = "/[A-Za-z_][A-Za-z0-9_]*/", " | ".join(map(quoted, self._words))
        nested = _listed(
            "{", f'{self._string} ": " any_value' if self._is_python else f'{key} ":" any_value', "}"
        )
        number, values = r"/-?[0-9]+(\.[0-9]+)?/", _listed("[", "any_value", "]")
        self._lark.add("any_value", f"{self._string} | {number} | {words} | {values} | {nested}")
        return _listed("(", f'{key} "=" any_value', ")") if self._is_python else nested

    def arguments(self, schema: Schema) -> str:
        opening, assigned, closing = "(=)" if self._is_python else "{:}"
        return f"{quoted(opening)} {self._members(schema, '{}' + assigned)} {quoted(closing)}"

    def _members(self, schema: Schema, key: str) -> str:
        """Return the members in the order of the schema; the optional ones may be left out."""
        members = [
            (self._lark.add_part(f"{quoted(key.format(name))} {self._value(each)}"), is_required)
            for name, each, is_required in _properties(schema)
        ]
        # The first member has no comma before it, so each one that may be the first has its own alternative.
        starts: list[str] = []
        rest = ""
        for member, is_required in reversed(members):
            starts = [f"{member} {rest}", *([] if is_required else starts)]
            rest = self._lark.add_part(f"({_COMMA} {member}){'' if is_required else '?'} {rest}")
        is_optional = not any(is_required for _, is_required in members)
        return f"({' | '.join(starts)}){'?' if is_optional else ''}" if starts else ""

    def _value(self, schema: Schema) -> str:
        if "enum" in schema or "const" in schema:
            _check(schema, _NOTES | {"type", "enum", "const"})
            return f"({' | '.join(map(self._written, schema.get('enum', [schema.get('const')])))})"
        match schema.get("type"):
            case "string":
                _check(schema, _NOTES | {"type"})
                return self._string
            case "integer" | "number":
                return json_value(schema, is_lenient=False)
            case "boolean":
                return f"({quoted(self._words[0])} | {quoted(self._words[1])})"
            case "null":
                return quoted(self._words[2])
            case "array" if "items" in schema:
                _check(schema, _NOTES | {"type", "items"})
                return _listed("[", self._lark.add_part(self._value(schema["items"])), "]")
            case "object" if "properties" in schema:
                key = '"{}": ' if self._is_python else "{}:"
                return f'"{{" {self._members(schema, key)} "}}"'
        keyword = next((each for each in schema if each not in _NOTES), "type")
        raise UnsupportedSchemaError(f"the keyword {keyword} of its schema cannot be enforced")

    def _written(self, value: object) -> str:
        """Return the symbols of one value of an enumeration."""
        if isinstance(value, bool) or value is None:
            return quoted(self._words[(True, False, None).index(value)])
        if isinstance(value, str) and not self._is_python:
            return f"{self._delimiter} {quoted(value)} {self._delimiter}".strip()
        return quoted(json.dumps(value, ensure_ascii=False))


def _listed(opening: str, member: str, closing: str) -> str:
    return f"{quoted(opening)} ({member} ({_COMMA} {member})*)? {quoted(closing)}"
