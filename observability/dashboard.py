"""Puts panels together into Grafana dashboards, and reads the expressions of dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Panel as BuiltPanel
from grafana_foundation_sdk.models.prometheus import Dataquery

from quire.observability.panels import DATASOURCE, Panel


class Expression(NamedTuple):
    """One expression of a board, and its place in the board."""

    board: str
    panel: str
    expression: str


def build_board(
    uid: str, title: str, description: str, rows: Mapping[str, Sequence[Panel]], instances_of: str = ""
) -> Dashboard:
    """Return a dashboard.

    Args:
        uid: the board's name in URLs and in its file's name.
        title: the heading.
        description: what the board is about.
        rows: panels under their headings, from left to right.
        instances_of: an expression with the ``instance`` labels to which users can limit the board; empty for
            none.
    """
    board = dashboard.Dashboard(title).uid(uid).description(description).tags(["quire"]).version(1)
    board.refresh("10s").time("now-30m", "now").timezone("browser").tooltip(DashboardCursorSync.CROSSHAIR)
    board.link(
        dashboard.DashboardLink("quire")
        .type(DashboardLinkType.DASHBOARDS)
        .tags(["quire"])
        .as_dropdown(True)
        .keep_time(True)
    )
    board.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    if instances_of:
        board.with_variable(_instance_variable(instances_of))
    ids = count(1)
    for heading, panels in rows.items():
        board.with_row(dashboard.Row(heading).id(next(ids)))
        for panel in panels:
            board.with_panel(panel.id(next(ids)))
    return board.build()


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


def panels_of(board: Dashboard) -> list[BuiltPanel]:
    """Return a board's panels without the headings of its rows."""
    return [panel for panel in board.panels or () if isinstance(panel, BuiltPanel)]


def expressions(board: Dashboard) -> Iterator[Expression]:
    """Yield every expression."""
    for panel in panels_of(board):
        for target in panel.targets or ():
            assert isinstance(target, Dataquery)
            yield Expression(board.uid or "", panel.title or "", target.expr)


def to_json(board: Dashboard) -> str:
    """Return the text of the board's file."""
    return JSONEncoder(indent=1, ensure_ascii=False).encode(board) + "\n"
