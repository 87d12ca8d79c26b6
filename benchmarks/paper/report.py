"""The result of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

Item = TypeVar("Item")


class Result(NamedTuple):
    """The outcome of one experiment.

    Attributes:
        table: our numbers and the paper's, in separate columns.
        notes: explanations for readers of the table.
        draw: draws the picture.
        raw: every number measured.
    """

    table: Table
    notes: str
    draw: Callable[[Axes], None]
    raw: dict[str, Any]

    def picture(self) -> Figure:
        """Draw the picture."""
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        self.draw(axes)
        axes.set_title(str(self.table.title))
        return figure


def progress(items: Iterable[Item], description: str) -> Iterable[Item]:
    """Yield the items behind a progress bar."""
    return track(list(items), description, console=Console(stderr=True), transient=True)
