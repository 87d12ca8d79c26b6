"""The format that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["json_schema", "regex", "grammar"]

MAX_FORMAT_BYTES = 64 << 10
"""Largest text of a format that a server takes."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A JSON schema, a regular expression that the whole answer matches, or a grammar in Lark's notation."""

    kind: Kind
    text: str


def choice_format(choices: Iterable[str]) -> OutputFormat:
    """Return a grammar that accepts exactly these texts.

    The texts form one terminal, which the lexer follows in a single state. As alternatives of a rule, each
    text would be an item of the parser, and the number of items is limited.
    """
    # Strings in a Lark grammar have the same escapes as strings in JSON, which leaves DEL as it is.
    texts = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return OutputFormat("grammar", f"start: CHOICE\nCHOICE: {' | '.join(texts)}")
