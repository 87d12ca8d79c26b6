"""Tables whose cells are formatted from rows of figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

from rich.table import Table


def table(title: str, rows: Iterable[Any], columns: Mapping[str, str]) -> Table:
    """Return a table.

    Args:
        title: what stands above it.
        rows: mappings or named tuples.
        columns: for each heading the format of its cells, as ``"{seconds:.1f}"``. Figures that are None give
            an empty cell.
    """
    result = Table(title=title, title_justify="left")
    for index, heading in enumerate(columns):
        result.add_column(heading, justify="right" if index else "left")
    for row in rows:
        figures = row if isinstance(row, Mapping) else row._asdict()
        result.add_row(*(_CELLS.vformat(cell, (), figures) for cell in columns.values()))
    return result


class _Cells(Formatter):
    def format_field(self, value: Any, spec: str) -> Any:
        return "" if value is None else super().format_field(value, spec)


_CELLS = _Cells()
