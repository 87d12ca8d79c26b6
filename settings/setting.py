"""Declares settings: dataclass fields that know their flag, variable, limits and help.

Each setting is written once, in the dataclass that holds it. The command line, the checks of values and the
tests of the documentation read it from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

ENV_PREFIX = "QUIRE_"
MAX_PORT = 65535

T = TypeVar("T")

_KEY = "setting"
_ADDRESS = re.compile(r"[^/\s]+:(\d{1,5})")


class SettingError(ValueError):
    """The model or the machine does not allow the value of a setting; the message names it."""


class Panel(StrEnum):
    """A heading of ``--help``, in the order in which it shows them."""

    COMMON = "What most people set"
    MODEL = "Model"
    CACHE = "KV cache"
    LIMITS = "Batch limits"
    ROUTING = "Routing"
    NETWORK = "Network"
    SECURITY = "Security"
    OBSERVABILITY = "Observability"
    PROCESS = "Process"


@dataclass(frozen=True, slots=True)
class Setting:
    """How users set one field.

    Attributes:
        flag: the option, such as ``--max-num-seqs``; a name without dashes is a positional argument.
        help: the description in ``--help``.
        panel: the heading under which ``--help`` shows it.
        minimum: the smallest value; None: no limit.
        maximum: the largest value; None: no limit.
        shown_default: text that ``--help`` shows instead of the default.
        is_size: whether the value is a number of bytes, which users write as 512MiB.
        problem: returns why a value is invalid, as the end of a sentence, or None.
    """

    flag: str
    help: str
    panel: Panel
    minimum: float | None = None
    maximum: float | None = None
    shown_default: str | None = None
    is_size: bool = False
    problem: Callable[[Any], str | None] | None = None


class SettingField(NamedTuple):
    """A field of a configuration that is a setting."""

    name: str
    type: Any
    default: Any
    setting: Setting

    def problem(self, value: Any) -> str | None:
        """Return why a value is not allowed, as the end of a sentence that begins with the name; or None."""
        choices = get_args(self.type) if get_origin(self.type) is Literal else ()
        if choices and value not in choices:
            return f"must be one of {', '.join(choices)}; got {value!r}"
        minimum, maximum = self.setting.minimum, self.setting.maximum
        is_low = minimum is not None and not value >= minimum
        is_high = maximum is not None and not value <= maximum
        if is_low or is_high:
            limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            return f"must be {limits}; got {value}"
        return None if self.setting.problem is None else self.setting.problem(value)


def setting(
    default: T,
    flag: str,
    help: str,
    panel: Panel,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    shown_default: str | None = None,
    is_size: bool = False,
    problem: Callable[[Any], str | None] | None = None,
    is_secret: bool = False,
) -> T:
    """Return a dataclass field that is a setting; see ``Setting`` for the arguments.

    Args:
        is_secret: leave the value out of the configuration's ``repr``, which may be logged.
    """
    described = Setting(flag, help, panel, minimum, maximum, shown_default, is_size, problem)
    return field(default=default, repr=not is_secret, metadata={_KEY: described})


def variable(flag: str) -> str:
    """Return the environment variable of a flag: ``--max-num-seqs`` is ``QUIRE_MAX_NUM_SEQS``."""
    return ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper()


@cache
def settings_of(config: Any) -> dict[str, SettingField]:
    """Return the settings of a dataclass by their fields' names, without those of nested dataclasses."""
    hints = get_type_hints(config)
    described: list[Field[Any]] = [each for each in fields(config) if _KEY in each.metadata]
    return {
        each.name: SettingField(each.name, hints[each.name], each.default, each.metadata[_KEY])
        for each in described
    }


def flag_of(config: type, name: str) -> str:
    """Return the flag of a field."""
    return settings_of(config)[name].setting.flag


def check_settings(config: Any, name_of: Callable[[str], str] | None = None) -> None:
    """Check every setting of a configuration against its choices and limits.

    Args:
        name_of: returns a field's name in messages; by default its flag.

    Raises:
        ValueError: a value is not allowed.
    """
    for name, each in settings_of(config.__class__).items():
        value = getattr(config, name)
        if value is not None and (problem := each.problem(value)) is not None:
            raise ValueError(f"{name_of(name) if name_of else each.setting.flag} {problem}")


def is_address(text: str) -> bool:
    """Return whether a text is host:port."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1]) <= MAX_PORT
