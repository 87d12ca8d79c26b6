"""The form that an answer must have; names as in vLLM."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.engine.structured_output import OutputFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """One form, given in one of these ways.

    Attributes:
        json: the answer is a JSON value that this schema accepts; a mapping, or its text.
        regex: the whole answer matches this regular expression.
        choice: the answer is one of these texts.
        grammar: the answer follows this grammar, in Lark's notation.
        json_object: the answer is some JSON object.

    Raises:
        ValueError: none is given, or several are.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(names)}; got {', '.join(given) or 'none'}")
        is_list = not isinstance(self.choice, str)
        if self.choice is not None and not (self.choice and is_list and all(self.choice)):
            raise ValueError(f"choice must be texts that are not empty; got {self.choice!r}")

    def to_format(self) -> OutputFormat:
        """Return what the engine compiles."""
        if self.regex is not None:
            return OutputFormat("regex", self.regex)
        if self.grammar is not None:
            return OutputFormat("grammar", self.grammar)
        if self.choice is not None:
            texts = (json_format.dumps(text, ensure_ascii=False) for text in self.choice)
            return OutputFormat("grammar", f"start: {' | '.join(texts)}")
        schema = {"type": "object"} if self.json is None else self.json
        return OutputFormat("json_schema", schema if isinstance(schema, str) else json_format.dumps(schema))
