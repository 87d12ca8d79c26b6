"""Grafana dashboards as data: rows of panels, laid out from left to right, and their JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SCHEMA_VERSION = 39
WIDTH = 24
"""Columns of a dashboard."""

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Target:
    """An expression, and the legend of its series, in Grafana's ``{{label}}`` syntax."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A chart of one or more expressions.

    Attributes:
        description: what the chart shows and by which formula; Grafana shows it on hovering.
        unit: Grafana's name of the values' unit.
        kind: "timeseries", "stat" or "heatmap"; a heatmap's target gives buckets by ``le``.
        is_stacked: whether the series add up.
    """

    title: str
    description: str
    targets: Sequence[Target]
    unit: str = "short"
    kind: str = "timeseries"
    is_stacked: bool = False
    width: int = 8
    height: int = 8

    def to_json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        """Return the panel in Grafana's JSON form."""
        return {
            "id": panel_id,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": _DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [self._target(index, target) for index, target in enumerate(self.targets)],
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
        }

    def _target(self, index: int, target: Target) -> dict[str, Any]:
        is_heatmap = self.kind == "heatmap"
        return {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": target.expression,
            "legendFormat": target.legend,
            "format": "heatmap" if is_heatmap else "time_series",
            "instant": False,
            "range": True,
        }

    def _defaults(self) -> dict[str, Any]:
        if self.kind != "timeseries":
            return {"unit": self.unit}
        return {
            "unit": self.unit,
            "min": 0,
            "custom": {
                "fillOpacity": 40 if self.is_stacked else 5,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.is_stacked else "none", "group": "A"},
            },
        }

    def _options(self) -> dict[str, Any]:
        if self.kind == "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
        if self.kind == "heatmap":
            return {"calculate": False, "yAxis": {"unit": self.unit}, "color": {"scheme": "Oranges"}}
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


class Expression(NamedTuple):
    """One expression of a board, and its place in the board."""

    board: str
    panel: str
    expression: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard.

    Attributes:
        uid: the board's name in URLs and in its file's name.
        instances_of: an expression whose ``instance`` label the board can be narrowed to; empty for none.
    """

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    instances_of: str = ""
    tags: Sequence[str] = field(default=("quire",))

    def expressions(self) -> Iterator[Expression]:
        """Yield every expression."""
        for row in self.rows:
            for panel in row.panels:
                for target in panel.targets:
                    yield Expression(self.uid, panel.title, target.expression)

    def to_json(self) -> str:
        """Return the file's text."""
        board = {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": list(self.tags),
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "templating": {"list": self._variables()},
            "links": [
                {
                    "type": "dashboards",
                    "tags": ["quire"],
                    "title": "quire",
                    "asDropdown": True,
                    "keepTime": True,
                    "includeVars": False,
                }
            ],
            "annotations": {"list": []},
            "panels": list(self._panels()),
        }
        return json.dumps(board, indent=1, ensure_ascii=False) + "\n"

    def _variables(self) -> list[dict[str, Any]]:
        variables: list[dict[str, Any]] = [
            {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
        ]
        if self.instances_of:
            query = f"label_values({self.instances_of}, instance)"
            variables.append(
                {
                    "name": "instance",
                    "type": "query",
                    "label": "Worker",
                    "datasource": _DATASOURCE,
                    "query": {"query": query, "refId": "instance"},
                    "definition": query,
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            )
        return variables

    def _panels(self) -> Iterator[dict[str, Any]]:
        panel_id, y = 1, 0
        for row in self.rows:
            yield {
                "id": panel_id,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
            panel_id, y, x, height = panel_id + 1, y + 1, 0, 0
            for panel in row.panels:
                if x + panel.width > WIDTH:
                    x, y, height = 0, y + height, 0
                yield panel.to_json(panel_id, x, y)
                panel_id, x, height = panel_id + 1, x + panel.width, max(height, panel.height)
            y += height
