"""Draws pictures of the dashboards from the data of a Prometheus, without Grafana."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter
from PIL import Image

from quire.observability.dashboard import WIDTH, Board, Panel
from quire.observability.live import LiveRun
from quire.observability.prometheus import Series

WIDTH_INCHES = 12.0
INCHES = 0.29
"""Inches for one unit of a panel's height."""
HEADING_INCHES = 0.3
DPI = 96
NUM_COLORS = 96
MAX_LEGENDS = 9
LEGEND_COLUMNS = 3
HEADROOM = 1.08
RATES = {"ops": "/s", "reqps": "/s", "Bps": " B/s", "bytes": " B"}


class Line(NamedTuple):
    """Panels side by side, and the heading of the row that they begin."""

    heading: str
    panels: Sequence[Panel]

    @property
    def inches(self) -> float:
        """Height of the line in inches."""
        return self.panels[0].height * INCHES + (HEADING_INCHES if self.heading else 0.0)


def draw(board: Board, run: LiveRun, folder: Path) -> Path:
    """Draw a board into ``folder`` and return the picture's path."""
    lines = list(_lines(board))
    heights = [line.inches for line in lines]
    size = (WIDTH_INCHES, sum(heights) + 0.4)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12))
    figure.suptitle(board.title, fontsize=13)
    parts = figure.subfigures(len(lines), 1, height_ratios=heights, squeeze=False)
    for part, line in zip(parts.flat, lines, strict=True):
        if line.heading:
            part.suptitle(line.heading, fontsize=11, x=0.01, ha="left", weight="bold")
        columns = part.subplots(1, WIDTH // line.panels[0].width, squeeze=False)[0]
        for axes, panel in zip(columns, line.panels, strict=False):
            _draw_panel(axes, panel, run)
        for axes in columns[len(line.panels) :]:
            axes.set_axis_off()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{board.uid}.png"
    picture = BytesIO()
    figure.savefig(picture, dpi=DPI)
    Image.open(picture).convert("RGB").quantize(NUM_COLORS).save(path, optimize=True)
    return path


def _lines(board: Board) -> Iterator[Line]:
    """Yield what a board shows from top to bottom."""
    for row in board.rows:
        per_line = WIDTH // row.panels[0].width
        heading = row.title
        for first in range(0, len(row.panels), per_line):
            yield Line(heading, row.panels[first : first + per_line])
            heading = ""


def _draw_panel(axes: Any, panel: Panel, run: LiveRun) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.tick_params(labelsize=7)
    drawn = [
        (_legend(target.legend, series), series)
        for target in panel.targets
        for series in run.series(target.expression)
    ]
    if panel.kind == "stat":
        _draw_stat(axes, panel, drawn[0][1])
        return
    if panel.kind == "heatmap":
        _draw_heatmap(axes, drawn, panel.unit)
        return
    if panel.is_stacked:
        _draw_stack(axes, drawn, run.start)
    else:
        for legend, series in drawn:
            axes.plot([at - run.start for at in series.times], series.values, label=legend, linewidth=1.2)
    axes.set_xlim(0, run.end - run.start)
    axes.set_ylim(0, (axes.dataLim.ymax * HEADROOM) or 1.0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, panel.unit)))
    _name(axes, drawn)


def _name(axes: Any, drawn: Sequence[tuple[str, Series]]) -> None:
    """Put the legend below the chart; series that are always 0 are left out unless there are no others."""
    named = [legend for legend, series in drawn if legend and any(series.values)]
    named = named or [legend for legend, _ in drawn if legend]
    handles, labels = axes.get_legend_handles_labels()
    shown = [(h, label) for h, label in zip(handles, labels, strict=True) if label in named]
    if shown:
        axes.legend(
            *zip(*shown[:MAX_LEGENDS], strict=True),
            fontsize=7,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.1),
            ncols=LEGEND_COLUMNS,
            frameon=False,
            handlelength=1.2,
            columnspacing=1.0,
        )


def _draw_stat(axes: Any, panel: Panel, series: Series) -> None:
    """Draw the last value above a line of the values over time."""
    axes.set_axis_off()
    axes.fill_between(series.times, series.values, alpha=0.25)
    axes.set_ylim(0, (axes.dataLim.ymax * 2.5) or 1.0)
    value = with_unit(series.values[-1], panel.unit)
    axes.text(0.5, 0.72, value, transform=axes.transAxes, ha="center", va="center", fontsize=18)


def _draw_stack(axes: Any, drawn: Sequence[tuple[str, Series]], start: float) -> None:
    times = sorted({at for _, series in drawn for at in series.times})
    rows = []
    for _, series in drawn:
        known = dict(zip(series.times, series.values, strict=True))
        rows.append([known.get(at, 0.0) for at in times])
    axes.stackplot([at - start for at in times], rows, labels=[legend for legend, _ in drawn], alpha=0.8)


def _draw_heatmap(axes: Any, drawn: Sequence[tuple[str, Series]], unit: str) -> None:
    """Draw how many observations fell into each bucket; Prometheus gives them cumulated."""
    ordered = sorted(drawn, key=lambda each: float(each[1].labels["le"]))
    times = ordered[0][1].times
    cumulated = [dict(zip(series.times, series.values, strict=True)) for _, series in ordered]
    counts = []
    below: dict[float, float] = {}
    for column in cumulated:
        counts.append([column.get(at, 0.0) - below.get(at, 0.0) for at in times])
        below = column
    axes.imshow(counts, aspect="auto", origin="lower", cmap="Oranges", interpolation="nearest")
    bounds = [float(series.labels["le"]) for _, series in ordered]
    named = range(0, len(bounds) - 1, 3)
    axes.set_yticks(named, [f"≤ {with_unit(bounds[index], unit)}" for index in named])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))


def _legend(template: str, series: Series) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: series.labels.get(match[1], ""), template)


def with_unit(value: float, unit: str) -> str:
    """Return a value as an axis shows it."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.4g} s"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{RATES.get(unit, '').lstrip()}"
    return f"{value:.3g}{RATES.get(unit, '')}"
