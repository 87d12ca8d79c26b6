"""Reads the ``response_template``, version 1, that a model's ``tokenizer_config.json`` may contain."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_NAMED_GROUP = re.compile(r"\(\?P<\w+>[^()]*\)")
_OPTIONAL = re.compile(r"\\s[*+]\??|\(\?:[^()]*\)[?*]|[\^$]")
_OTHER_SYNTAX = re.compile(r"(?<!\\)[()|*+?{}\[\]]")
_ESCAPE = re.compile(r"\\(.)")


class ResponseTemplate(NamedTuple):
    """The delimiters of a template; its patterns count as texts, and what has no such text is empty."""

    source: str
    """All texts, in which the marks of a known format can be found."""
    reasoning: tuple[str, str]
    """The texts before and after reasoning."""
    call_open: tuple[str, ...]
    """The texts before and after the name of a call, or only the text before a call that includes it."""
    call_close: tuple[str, ...]
    parameter: tuple[str, ...]
    """The texts before the key, between key and value, and after the value of a raw parameter."""
    is_list: bool
    """Whether one JSON list has all calls."""


def read_response_template(template: object) -> ResponseTemplate | None:
    """Return what a template says, or None if it is none of version 1."""
    if not isinstance(template, Mapping) or template.get("version", 1) != 1:
        return None
    fields = template.get("fields")
    if not isinstance(fields, Mapping):
        return None
    reasoning, call = (
        next((field for name in names if isinstance(field := fields.get(name), Mapping)), {})
        for names in (("reasoning_content", "thinking"), ("tool_calls",))
    )
    opened, closed = _texts(reasoning, "open"), _texts(reasoning, "close")
    arguments = call.get("content_args")
    return ResponseTemplate(
        _ESCAPE.sub(r"\1", "\n".join(_strings(fields))),
        ("".join(opened[:1]).strip(), "".join(closed[:1]).strip()),
        _texts(call, "open"),
        _texts(call, "close"),
        _texts(arguments, "tag") if isinstance(arguments, Mapping) else (),
        bool(call.get("transform_each")),
    )


def _texts(field: Mapping[str, Any], end: str) -> tuple[str, ...]:
    """Return the texts around the named groups of a delimiter, or none if it has other syntax."""
    literal, pattern = field.get(end), str(field.get(f"{end}_pattern", ""))
    if literal:
        return (str(literal[0] if isinstance(literal, list) else literal),)
    parts = [_OPTIONAL.sub("", part) for part in _NAMED_GROUP.split(pattern)]
    if not pattern or any(map(_OTHER_SYNTAX.search, parts)):
        return ()
    return tuple(_ESCAPE.sub(r"\1", part) for part in parts)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(each)
