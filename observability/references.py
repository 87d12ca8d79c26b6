"""Finds the series and labels that a PromQL expression refers to, without a server."""

from __future__ import annotations

import re
from typing import NamedTuple

KEYWORDS = frozenset(
    {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "offset", "bool"}
)

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_DURATION = re.compile(r"\[[^\]]*\]")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"\b([a-z_:][\w:]*)(?![\w:])\s*(\{[^}]*\})?(?!\s*\()", re.IGNORECASE)
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


class Selector(NamedTuple):
    """A series' name, the labels that it is chosen by, and its text."""

    name: str
    labels: frozenset[str]
    text: str


class References(NamedTuple):
    """The series that an expression refers to, and the labels that it groups or joins by."""

    selectors: tuple[Selector, ...]
    grouping: frozenset[str]


def references(expression: str) -> References:
    """Return the series and labels of an expression."""
    texts = _STRING.findall(expression)
    bare = _DURATION.sub("", _STRING.sub('""', expression))
    groupings = _GROUPING.findall(bare)
    grouping = frozenset(
        label.strip() for labels in groupings for label in labels.split(",") if label.strip()
    )
    bare = _GROUPING.sub(" ", bare)
    selectors = []
    strings = iter(texts)
    for match in _SELECTOR.finditer(bare):
        name, matchers = match[1], match[2] or ""
        filled = re.sub('""', lambda _: next(strings), matchers)
        if name not in KEYWORDS:
            selectors.append(Selector(name, frozenset(_MATCHER.findall(matchers)), name + filled))
    return References(tuple(selectors), grouping)
