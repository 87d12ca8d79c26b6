"""Options for the parameters of a request, one for each row of their tables that has a help text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

import typer

from quire.sampling.parameter import Entry, table
from quire.sampling.params import BeamParams, SamplingParams

if TYPE_CHECKING:
    from quire.client import GenerationOptions


class _Options:
    """Options that are parameters of a request.

    Attributes:
        params: the dataclass of the parameters.
        panel: the heading of the options on the help page.
    """

    params: ClassVar[type]
    panel: ClassVar[str]

    def given(self) -> GenerationOptions:
        """Return the options by the names that the client has for them."""
        entries, texts = table(self.params), asdict(self)  # type: ignore[call-overload]
        return cast("GenerationOptions", {name: _value(entries[name], texts[name]) for name in texts})


T = TypeVar("T", bound=_Options)


def _with_options(kind: type[T]) -> type[T]:
    """Return a class as a dataclass, with an optional field for each parameter that has a help text."""
    entries = [entry for entry in table(kind.params).values() if entry.parameter.help]
    kind.__annotations__ = {entry.name: _option(entry, kind.panel) for entry in entries}
    for name in kind.__annotations__:
        setattr(kind, name, None)
    return dataclass(frozen=True)(kind)


def _option(entry: Entry, panel: str) -> Any:
    name, kind, _, parameter = entry
    # The ranges of integers are obvious, or as large as the integers of a message.
    limits = f" ({parameter.range})" if kind is float else ""
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=f"{parameter.help.removesuffix('.')}{limits}.",
        rich_help_panel=panel,
    )
    if get_origin(kind) is Literal:
        kind = Literal[tuple(_text(value) for value in get_args(kind))]
    return Annotated[kind | None, option]


def _text(value: object) -> str:
    """Return the text of the command line for one of a parameter's few values, such as ``true`` for True."""
    return str(value).lower()


def _value(entry: Entry, given: Any) -> Any:
    """Return the parameter's value for what was given on the command line."""
    if get_origin(entry.type) is not Literal:
        return given
    return next((value for value in get_args(entry.type) if _text(value) == given), None)


@_with_options
class SamplingOptions(_Options):
    """How to sample tokens; an option that is not given leaves the choice to the server."""

    params = SamplingParams
    panel = "Sampling"


@_with_options
class BeamOptions(_Options):
    """How a beam search scores its answers, and when it ends."""

    params = BeamParams
    panel = "Beam search"
