"""Expands dataclasses into command-line options, so that several verbs share options declared once.

A parameter of a verb may be a configuration, whose settings become options, or a dataclass whose fields are
annotated with options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from quire.cli.failure import usage_errors
from quire.cli.setting_options import OptionRules, build, has_settings, setting_parameters
from quire.settings.setting import Panel


class _Group(NamedTuple):
    """A parameter of a verb that becomes several options."""

    type: Any
    rules: OptionRules

    def parameters(self) -> list[Parameter]:
        if has_settings(self.type):
            return setting_parameters(self.type, self.rules)
        hints = get_type_hints(self.type, include_extras=True)
        return [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])
            for each in fields(self.type)
        ]

    def value(self, given: Mapping[str, Any]) -> Any:
        if has_settings(self.type):
            return build(self.type, self.rules, given)
        return self.type(**{each.name: given[each.name] for each in fields(self.type)})


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Return a verb in which each dataclass parameter is replaced by one option for each of its fields.

    A setting that several configurations have in common becomes one option, whose value goes to all of them.

    Raises:
        TypeError: two different options have the same name.
    """
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: group for name, hint in hints.items() if (group := _group(hint)) is not None}
    parameters: dict[str, Parameter] = {}
    for name, own in signature(verb).parameters.items():
        own = own.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        for each in groups[name].parameters() if name in groups else [own]:
            if _content(parameters.setdefault(each.name, each)) != _content(each):
                raise TypeError(f"{verb.__name__}: two of its options have the same name {each.name}")

    @wraps(verb)
    def spread_verb(**given: Any) -> None:
        own = {name: given[name] for name in hints.keys() & given.keys()}
        with usage_errors():
            values = {name: group.value(given) for name, group in groups.items()}
        verb(**own, **values)

    ordered = sorted(parameters.values(), key=_panel_index)
    spread_verb.__signature__ = Signature(ordered)  # type: ignore[attr-defined]
    spread_verb.__annotations__ = {each.name: each.annotation for each in ordered}
    return spread_verb


def _group(hint: Any) -> _Group | None:
    """Return the group that a parameter's type describes; None if the parameter is one option."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not is_dataclass(kind):
        return None
    return _Group(kind, next((extra for extra in extras if isinstance(extra, OptionRules)), OptionRules()))


def _content(parameter: Parameter) -> tuple[Any, ...]:
    """Return what distinguishes an option from others."""
    kind, *options = get_args(parameter.annotation) or (parameter.annotation,)
    return (kind, parameter.default, *(vars(option) for option in options if hasattr(option, "help")))


def _panel_index(parameter: Parameter) -> int:
    """Return the position of an option's panel, so that every verb shows its panels in the same order."""
    panels = [getattr(option, "rich_help_panel", None) for option in get_args(parameter.annotation)]
    return next((list(Panel).index(panel) for panel in panels if isinstance(panel, Panel)), -1)
