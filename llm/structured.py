"""The format that an answer must have; the names are those of vLLM."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.sampling.output_format import OutputFormat, choice_format


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The format of an answer, given by exactly one of these fields.

    Attributes:
        json: JSON schema, as a mapping or as text; the answer is a JSON value that it accepts.
        regex: regular expression that the whole answer matches.
        choice: texts, one of which is the answer.
        grammar: grammar in Lark's notation that the answer follows.
        json_object: whether the answer is any JSON object.

    Raises:
        ValueError: no field is given, or several fields are.
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
        """Return the format in the form that the engine compiles."""
        if self.regex is not None:
            return OutputFormat("regex", self.regex)
        if self.grammar is not None:
            return OutputFormat("grammar", self.grammar)
        if self.choice is not None:
            return choice_format(self.choice)
        schema = {"type": "object"} if self.json is None else self.json
        return OutputFormat("json_schema", schema if isinstance(schema, str) else json_format.dumps(schema))
