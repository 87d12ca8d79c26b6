"""Expands dataclasses into command-line options, so that several verbs share options declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb in which each dataclass parameter is replaced by one option for each of its fields.

    Raises:
        TypeError: two options have the same name.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(verb).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
    if len({parameter.name for parameter in parameters}) < len(parameters):
        raise TypeError(f"{verb.__name__}: two of its options have the same name")

    @wraps(verb)
    def spread_verb(**given: Any) -> None:
        values = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        verb(**given, **values)

    spread_verb.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    spread_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread_verb


def _parameters(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]
