"""Makes Grafana dashboards from the files in ``boards``.

A quotient or a quantile without observations is NaN. The files compare it with 0, which drops it, so that a
panel shows a gap instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
)

from quire.observability.panels import DATASOURCE, PanelSpec, build_panel

BOARDS = Path(__file__).with_name("boards")


def read_board(name: str) -> Dashboard:
    """Return the dashboard that a file describes.

    In an expression, ``$NAME`` stands for the text of that name under ``names``. ``shared: NAME`` stands for
    the panels of that name in shared.yml.
    """
    given, shared = _read(name), _read("shared")
    board = dashboard.Dashboard(given["title"]).uid(given["uid"]).description(given["description"])
    board.tags(["quire"]).version(1)
    board.refresh("10s").time("now-30m", "now").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    board.link(
        dashboard.DashboardLink("quire")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["quire"])
        .as_dropdown(True)
        .keep_time(True)
    )
    board.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    if "instances_of" in given:
        board.with_variable(_instance_variable(given["instances_of"]))
    ids = count(1)
    for heading, entries in given["rows"].items():
        board.with_row(dashboard.Row(heading).id(next(ids)))
        for spec in _panel_specs(entries, shared, given.get("names", {})):
            board.with_panel(build_panel(spec).id(next(ids)))
    return board.build()


def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((BOARDS / f"{name}.yml").read_text("utf-8"))
    return content


def _panel_specs(
    entries: Iterable[Mapping[str, Any]],
    shared: Mapping[str, Iterable[Mapping[str, Any]]],
    names: Mapping[str, str],
) -> Iterator[PanelSpec]:
    for entry in entries:
        if "shared" in entry:
            yield from _panel_specs(shared[entry["shared"]], shared, names)
            continue
        spec = PanelSpec(**entry)
        series = {legend: _expanded(expression, names) for legend, expression in spec.series.items()}
        yield replace(spec, series=series, number=_expanded(spec.number, names))


def _expanded(expression: str, names: Mapping[str, str]) -> str:
    for name, text in names.items():
        expression = expression.replace(f"${name}", text)
    return expression


def _instance_variable(instances_of: str) -> dashboard.QueryVariable:
    query: dict[str, object] = {"query": f"label_values({instances_of}, instance)", "refId": "instance"}
    return (
        dashboard.QueryVariable("instance")
        .label("Worker")
        .datasource(DATASOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .include_all(True)
        .multi(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def to_json(board: Dashboard) -> str:
    """Return the text of the board's file."""
    return JSONEncoder(indent=1, ensure_ascii=False).encode(board) + "\n"
