"""Prints tables of results."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

MAX_COLUMNS = 10_000


def print_table(table: Table) -> None:
    """Print a table to stdout in full, even if stdout is narrower or not a terminal."""
    from rich.console import Console

    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=MAX_COLUMNS)).maximum
    console.width = max(console.width, needed)
    console.print(table)
