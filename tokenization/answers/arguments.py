"""Turns the arguments of calls into JSON text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

_ERRORS = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""What reading and writing values that a model wrote can raise."""
_TYPE_NAMES: dict[type, str] = {
    **{dict: "object", list: "array", str: "string"},
    **{bool: "boolean", int: "integer", float: "number", type(None): "null"},
}
_CONSTANTS = {"true": True, "false": False, "null": None}
_UNQUOTED_KEY = re.compile(r"([{,]\s*)([^\s:{}\[\],\"\\]+)\s*:")


def json_object(text: str) -> str | None:
    """Return the text of a JSON object, or None if it is no object; a string may hold the object.

    Line breaks in strings, which models write and JSON does not allow, are escaped.
    """
    try:
        value = _load(text)
    except _ERRORS:
        try:
            value = json.loads(text, strict=False, parse_constant=_refuse)
            text = json.dumps(value)
        except _ERRORS:
            return None
    if isinstance(value, str):
        return json_object(value) if value.lstrip().startswith("{") else None
    if value is None:
        return "{}"
    return text if isinstance(value, dict) else None


def parameter_types(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return the JSON types that the schema of a tool's parameters allows for one of them; none: any type."""
    try:
        return _types(schema["properties"][key], schema, set())
    except _ERRORS:  # a schema that is not well formed says nothing
        return set()


def json_value(text: str, types: set[str]) -> str:
    """Return the raw text of an argument as JSON of one of its types, or else as a JSON string."""
    for load in (_load, _load_literal) if types != {"string"} else ():
        try:
            value = load(text.strip())
            if _has_type(value, types):
                return text.strip() if load is _load else json.dumps(value, allow_nan=False)
        except _ERRORS:
            continue
    return json.dumps(text, ensure_ascii=False)


def json_of_key_values(parts: list[tuple[str, bool]]) -> str | None:
    """Return an object with unquoted keys as JSON, or None; each part of the text is a string or is not."""
    text = "".join(
        json.dumps(part, ensure_ascii=False) if is_string else _UNQUOTED_KEY.sub(r'\1"\2":', part)
        for part, is_string in parts
    )
    return json_object(text)


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return name and arguments of each call in a Python list of calls; none if the text is something else.

    Nothing is evaluated.
    """
    try:
        tree = ast.parse(text, mode="eval").body
        return [_python_call(call) for call in tree.elts] if isinstance(tree, ast.List) else []
    except _ERRORS:
        return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args or not all(each.arg for each in call.keywords):
        raise ValueError("this is no call with keywords")
    values = {each.arg: _literal(each.value) for each in call.keywords}
    return ast.unparse(call.func), json.dumps(values, allow_nan=False)


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _load_literal(text: str) -> Any:
    return _literal(ast.parse(text, mode="eval").body)


def _literal(node: ast.expr) -> Any:
    return ast.literal_eval(_JsonConstants().visit(node))


class _JsonConstants(ast.NodeTransformer):
    """Reads JSON's names of constants, which models write among Python literals."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _types(schema: object, root: Mapping[str, Any], followed: set[str]) -> set[str]:
    """Return the JSON types that a schema allows, or none if it does not say; follow each reference once."""
    if not isinstance(schema, Mapping) or schema.get("$ref") in followed:
        return set()
    if "$ref" in schema:
        followed.add(schema["$ref"])
        target: Any = root
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return _types(target, root, followed)
    declared = schema.get("type", [])
    if declared:
        return {declared} if isinstance(declared, str) else set(map(str, declared))
    values = [schema["const"]] if "const" in schema else schema.get("enum") or []
    choices = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key) or []]
    return {_TYPE_NAMES.get(type(value), "") for value in values}.union(
        *(_types(each, root, followed) for each in choices)
    )


def _has_type(value: object, types: set[str]) -> bool:
    """Return whether a value that a model wrote as raw text is one of its types, and not text."""
    name = _TYPE_NAMES.get(type(value), "")
    if name == "null":
        return "null" in types or "string" not in types
    names = {"integer", "number"} if name in ("integer", "number") else {name}
    return name != "string" and (not types or not names.isdisjoint(types))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
