"""Pictures of the dashboards, drawn from a Prometheus: what Grafana would show, without one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from PIL import Image

from quire.observability.dashboard import Board, Panel
from quire.observability.live import LiveRun
from quire.observability.prometheus import Series

COLUMNS = 3
PANEL_INCHES = (3.6, 2.1)
DPI = 72
NUM_COLORS = 48
MAX_LEGENDS = 8


def draw(board: Board, run: LiveRun, folder: Path) -> Path:
    """Draw a board into ``folder`` and return the picture's path."""
    panels = [panel for row in board.rows for panel in row.panels]
    num_rows = -(-len(panels) // COLUMNS)
    size = (COLUMNS * PANEL_INCHES[0], num_rows * PANEL_INCHES[1] + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(board.title, fontsize=11)
    axes = figure.subplots(num_rows, COLUMNS, squeeze=False)
    for index, each in enumerate(axes.flat):
        if index < len(panels):
            _draw_panel(each, panels[index], run)
        else:
            each.set_axis_off()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{board.uid}.png"
    picture = BytesIO()
    figure.savefig(picture, dpi=DPI)
    Image.open(picture).convert("RGB").quantize(NUM_COLORS, method=Image.Quantize.MAXCOVERAGE).save(
        path, optimize=True
    )
    return path


def _draw_panel(axes: Any, panel: Panel, run: LiveRun) -> None:
    axes.set_title(panel.title, fontsize=8)
    axes.tick_params(labelsize=6)
    drawn = [
        (_legend(target.legend, series), series)
        for target in panel.targets
        for series in run.series(target.expression)
    ]
    if panel.kind == "heatmap":
        _draw_heatmap(axes, drawn)
        return
    if panel.is_stacked:
        _draw_stack(axes, drawn)
    else:
        for legend, series in drawn:
            axes.plot([at - run.start for at in series.times], series.values, label=legend, linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_unit(value, panel.unit)))
    # What is always 0 needs no name unless nothing else is there.
    named = [legend for legend, series in drawn if legend and any(series.values)]
    handles, labels = axes.get_legend_handles_labels()
    shown = [(h, label) for h, label in zip(handles, labels, strict=True) if label in named]
    if shown:
        axes.legend(*zip(*shown[:MAX_LEGENDS], strict=True), fontsize=5, loc="upper left", framealpha=0.5)


def _draw_stack(axes: Any, drawn: Sequence[tuple[str, Series]]) -> None:
    times = sorted({at for _, series in drawn for at in series.times})
    rows = []
    for _, series in drawn:
        known = dict(zip(series.times, series.values, strict=True))
        rows.append([known.get(at, 0.0) for at in times])
    start = times[0] if times else 0.0
    axes.stackplot([at - start for at in times], rows, labels=[legend for legend, _ in drawn], alpha=0.8)


def _draw_heatmap(axes: Any, drawn: Sequence[tuple[str, Series]]) -> None:
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
    labels = [series.labels["le"] for _, series in ordered]
    axes.set_yticks(range(0, len(labels), 3), labels[::3])


def _legend(template: str, series: Series) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: series.labels.get(match[1], ""), template)


def with_unit(value: float, unit: str) -> str:
    """Return a value as an axis shows it."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"
