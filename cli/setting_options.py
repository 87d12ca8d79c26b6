"""Makes command-line options of the settings that a configuration declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import typer

from quire.cli.options import option
from quire.cli.sizes import exact_size, parse_disk_folder, parse_size
from quire.services.worker.config import DiskFolder
from quire.settings.setting import SettingField, settings_of, variable


@dataclass(frozen=True, kw_only=True)
class OptionRules:
    """Which settings of a configuration a verb has as options, and with which defaults.

    Attributes:
        fixed: values of fields that the verb sets itself.
        omitted: fields that keep their default.
        defaults: the verb's own defaults.
        shown: text that ``--help`` shows instead of a default, by field.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    omitted: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)


def has_settings(hint: Any) -> bool:
    """Return whether a type is a configuration: a dataclass with settings."""
    return isinstance(hint, type) and is_dataclass(hint) and bool(settings_of(hint))


def setting_parameters(config: type, rules: OptionRules) -> list[Parameter]:
    """Return a parameter for each setting that a verb offers, those of nested configurations too."""
    parameters = []
    for name, hint in _offered(config, rules).items():
        if has_settings(hint):
            parameters += setting_parameters(hint, OptionRules())
        else:
            parameters.append(_parameter(settings_of(config)[name], rules))
    return parameters


def build(config: type, rules: OptionRules, given: Mapping[str, Any]) -> Any:
    """Return the configuration that the values of its options describe.

    Raises:
        ValueError: the configuration refuses them.
    """
    values = dict(rules.fixed)
    for name, hint in _offered(config, rules).items():
        if has_settings(hint):
            values[name] = build(hint, OptionRules(), given)
        else:
            values[name] = _converted(hint, given[name])
    return config(**values)


def _offered(config: Any, rules: OptionRules) -> dict[str, Any]:
    """Return the types of the fields that a verb offers, by name."""
    hints, settings = get_type_hints(config), settings_of(config)
    names = [each.name for each in fields(config) if each.name not in {*rules.fixed, *rules.omitted}]
    return {name: hints[name] for name in names if name in settings or has_settings(hints[name])}


def _parameter(each: SettingField, rules: OptionRules) -> Parameter:
    """Return the parameter that typer reads; a field's type decides how its text is parsed and checked."""
    setting, kind = each.setting, _without_none(each.type)
    default = rules.defaults.get(each.name, each.default)
    if not setting.flag.startswith("--"):
        argument = typer.Argument(help=setting.help, envvar=variable(setting.flag), metavar=setting.flag)
        return _keyword(each.name, default, each.type, argument)
    more: dict[str, Any] = {}
    annotation = each.type
    shown = rules.shown.get(each.name, setting.shown_default)
    if shown is not None:
        more["show_default"] = shown
    if setting.is_size:
        more |= {"parser": parse_size, "metavar": "SIZE"}
        default = None if default is None else exact_size(default)
    elif kind in (int, float):
        more |= {"min": setting.minimum, "max": setting.maximum}
    elif kind is DiskFolder:
        more |= {"parser": parse_disk_folder, "metavar": "FOLDER:SIZE"}
    elif kind is bytes:
        annotation, default, more["show_default"] = str, default.decode(), False
    elif kind == tuple[str, ...]:
        annotation, default = list[str] | None, None
    elif kind is Path:
        more |= {"exists": True, "dir_okay": False}
    return _keyword(each.name, default, annotation, option(setting.flag, setting.help, setting.panel, **more))


def _keyword(name: str, default: Any, annotation: Any, described: Any) -> Parameter:
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, described]
    )


def _converted(hint: Any, value: Any) -> Any:
    """Return the value of a field whose type the command line cannot give."""
    if hint is bytes:
        return value.encode()
    return tuple(value or ()) if hint == tuple[str, ...] else value


def _without_none(hint: Any) -> Any:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return kinds[0] if NoneType in get_args(hint) else hint
