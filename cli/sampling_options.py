"""Options for the parameters of a request, one for each row of their table that has a help text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from quire.sampling.parameter import Entry, table
from quire.sampling.params import SamplingParams

if TYPE_CHECKING:
    from quire.client import GenerationOptions

T = TypeVar("T")


def _with_options(kind: type[T]) -> type[T]:
    """Return a class as a dataclass, with an optional field for each parameter that has a help text."""
    kind.__annotations__ = {
        entry.name: _option(entry) for entry in table(SamplingParams).values() if entry.parameter.help
    }
    for name in kind.__annotations__:
        setattr(kind, name, None)
    return dataclass(frozen=True)(kind)


def _option(entry: Entry) -> Any:
    name, kind, _, parameter = entry
    # The ranges of integers are obvious, or as large as the integers of a message.
    limits = f" ({parameter.range})" if kind is float else ""
    option = typer.Option(
        "--" + name.replace("_", "-"),
        help=f"{parameter.help.removesuffix('.')}{limits}.",
        rich_help_panel="Sampling",
    )
    return Annotated[kind | None, option]


@_with_options
class SamplingOptions:
    """How to sample tokens; an option that is not given leaves the choice to the server."""

    def given(self) -> GenerationOptions:
        """Return the options by the names that the client has for them."""
        return cast("GenerationOptions", asdict(self))  # type: ignore[call-overload]
