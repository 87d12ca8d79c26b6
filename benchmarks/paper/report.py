"""The result of an experiment, and its output as a table, a picture and raw numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one experiment.

    Attributes:
        name: name of the result's files.
        columns: columns of the table; the paper's numbers have separate columns.
        notes: what a reader of the table must know.
        draw: draws the picture.
        raw: every number measured.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: str
    draw: Callable[[Axes], None]
    raw: dict[str, Any] = field(default_factory=dict)


def progress(items: Iterable[Item], description: str) -> Iterable[Item]:
    """Yield the items behind a progress bar."""
    return track(list(items), description, console=Console(stderr=True), transient=True)


def show(result: Result, console: Console) -> None:
    """Print the table."""
    table = Table(*result.columns, title=result.title, caption=result.notes, caption_justify="left")
    for row in result.rows:
        table.add_row(*row)
    console.print(table)


def save(result: Result, folder: Path) -> None:
    """Write the picture and the raw numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    result.draw(axes)
    axes.set_title(result.title)
    figure.savefig(folder / f"{result.name}.png", dpi=120)
    document = {"experiment": result.name, "columns": result.columns, "rows": result.rows, **result.raw}
    (folder / f"{result.name}.json").write_text(json.dumps(document, indent=1) + "\n")
