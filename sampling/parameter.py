"""Describes the parameters of a request as data: the field of each, its range and its help text."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints


class ParameterError(ValueError):
    """A parameter has a value that can never be served.

    Attributes:
        field: path of the field in ``quire.v1.Generation``, such as ``sampling.top_p``.
        problem: what the value must be, and what it is.
        limit: the limit that it breaks; None if there is no single one.
    """

    def __init__(self, field: str, problem: str, limit: str | None = None) -> None:
        super().__init__(field, problem, limit)
        self.field = field
        self.problem = problem
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.name} {self.problem}"

    @property
    def name(self) -> str:
        """The field's name without the messages that contain it."""
        return self.field.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from ``low`` to ``high``; ``low`` itself is left out if ``excludes_low`` is true."""

    low: float
    high: float = math.inf
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        if self.excludes_low:
            return self.low < value <= self.high
        # Many messages have numbers in single precision, in which 0.01 is slightly less than 0.01.
        return self.low <= value <= self.high or value == _single(self.low)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {_number(self.low)}"
        if self.excludes_low:
            return f"above {_number(self.low)} and at most {_number(self.high)}"
        return f"from {_number(self.low)} to {_number(self.high)}"

    @property
    def limit(self) -> str:
        """The upper end; the lower end if there is no upper one."""
        return _number(self.low if self.high == math.inf else self.high)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Annotates a field of a dataclass of parameters.

    Attributes:
        path: the field of ``quire.v1.Generation`` that holds the parameter.
        range: the range of a number, or of each number in a tuple of (token id, number).
        help: text of the option of the command line; a parameter without it has no such option.
        max_items: most items of a collection.
    """

    path: str
    range: Range | None = None
    help: str = ""
    max_items: int | None = None

    def check(self, value: Any) -> None:
        """Check one value.

        Raises:
            ParameterError: the value is outside its range.
        """
        if self.max_items is not None:
            self.check_size(value)
        if self.range is None:
            return
        if isinstance(value, tuple):
            for token_id, number in value:
                if number not in self.range:
                    raise _outside(self.range, number, f"{self.path}[{token_id}]")
        elif value not in self.range:
            raise _outside(self.range, value, self.path)

    def check_size(self, value: Any) -> None:
        """Check the number of items of a collection.

        Raises:
            ParameterError: there are too many.
        """
        if self.max_items is not None and len(value) > self.max_items:
            limit = str(self.max_items)
            raise ParameterError(self.path, f"must be at most {limit}; got {len(value)}", limit)


class Entry(NamedTuple):
    """A row of the table of parameters: the name, type and default in the dataclass, and the annotation."""

    name: str
    type: Any
    default: Any
    parameter: Parameter


@cache
def table(kind: type) -> dict[str, Entry]:
    """Return the parameters of a dataclass by their names; all of its fields are annotated."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: Entry(field.name, _type(hints[field.name]), field.default, _parameter(hints[field.name]))
        for field in fields(kind)
    }


def check(params: Any) -> None:
    """Check each parameter of an object of a dataclass; defaults are valid by definition.

    Raises:
        ParameterError: a value is outside its range.
    """
    for name, _, default, parameter in table(params.__class__).values():
        value = getattr(params, name)
        if value != default:
            parameter.check(value)


def check_values(kind: type, values: Mapping[str, Any]) -> None:
    """Check some parameters of a dataclass, by their names.

    Raises:
        ParameterError: a value is outside its range.
    """
    parameters = table(kind)
    for name, value in values.items():
        parameters[name].parameter.check(value)


def _parameter(hint: Any) -> Parameter:
    (parameter,) = hint.__metadata__
    assert isinstance(parameter, Parameter)
    return parameter


def _type(hint: Any) -> Any:
    """Return the annotated type, without ``None``."""
    annotated = get_args(hint)[0]
    kinds = [kind for kind in get_args(annotated) if kind is not NoneType]
    return kinds[0] if len(kinds) < len(get_args(annotated)) else annotated


def _outside(numbers: Range, number: float, path: str) -> ParameterError:
    return ParameterError(path, f"must be {numbers}; got {_number(number)}", numbers.limit)


def _single(value: float) -> float:
    """Return the number that is nearest to a value in single precision."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
