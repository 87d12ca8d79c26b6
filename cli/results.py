"""Shows results on stdout, and on stderr the progress of the work that leads to them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

MAX_COLUMNS = 10_000


def write(text: str) -> None:
    """Write a piece of a result to stdout and flush it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_table(table: Table) -> None:
    """Print a table to stdout in full, even if stdout is narrower or not a terminal."""
    from rich.console import Console

    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=MAX_COLUMNS)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def progress_bars() -> Progress:
    """Return progress bars on stderr, since stdout is for results only; hidden if it is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
