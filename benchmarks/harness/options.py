"""Turns the fields of a dataclass into options of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Read = Callable[[str], Any]


class OneOf(tuple[str, ...]):
    """The values that an option, or each item of it, may have."""


class AtLeast(int):
    """The smallest number that an option may have."""


def add_options(parser: argparse.ArgumentParser, options: type[object]) -> None:
    """Add an option for each field of a dataclass.

    A field's type may be annotated with its help text, ``OneOf`` and ``AtLeast``. The items of a tuple are
    separated by commas. A tuple without a default is positional, and empty if the command line has none of
    its items.
    """
    hints = get_type_hints(options, include_extras=True)
    for each in fields(options):  # type: ignore[arg-type]
        _add(parser, each, hints[each.name])


def _add(parser: argparse.ArgumentParser, each: Field[Any], hint: Any) -> None:
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    known: Sequence[str] = next((extra for extra in extras if isinstance(extra, OneOf)), ())
    minimum = next((extra for extra in extras if isinstance(extra, AtLeast)), None)
    about = " ".join(extra for extra in extras if isinstance(extra, str))
    if NoneType in get_args(kind):
        [kind] = set(get_args(kind)) - {NoneType}
    if kind is bool:
        parser.add_argument(_flag(each.name), action="store_true", help=about)
        return
    is_list = get_origin(kind) is tuple
    item = get_args(kind)[0] if is_list else kind
    if get_origin(item) is Literal:
        item, known = str, get_args(item)
    read = _reader(item, known, minimum)
    metavar = ",".join(known) or each.name.upper()
    if each.default is MISSING:
        parser.add_argument(each.name, nargs="*", type=read, help=f"{about} {','.join(known)}")
    else:
        read = _list_reader(read) if is_list else read
        parser.add_argument(_flag(each.name), type=read, default=each.default, help=about, metavar=metavar)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _reader(kind: Read, known: Sequence[str], minimum: int | None) -> Read:
    def read(word: str) -> Any:
        if known and word not in known:
            raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(known)}")
        value = kind(word)
        if minimum is not None and value < minimum:
            raise argparse.ArgumentTypeError(f"{word} is less than {minimum}")
        return value

    return read


def _list_reader(read: Read) -> Read:
    def read_list(words: str) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(map(read, words.split(","))))

    return read_list
