"""The dashboards: made from code, complete, and about metrics that exist."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
from grafana_foundation_sdk.models.dashboard import Dashboard

from quire.observability.build import BOARDS, BuiltFile, built_files
from quire.observability.dashboard import to_json
from quire.services.server.phases import HAND_OVER, PROMPT_PHASES, ROUTER_PHASES
from tests.testing.promql import expressions, panels_of, references


@pytest.mark.parametrize("file", list(built_files()), ids=lambda file: file.path.name)
def test_committed_files_are_what_the_code_makes(file: BuiltFile) -> None:
    assert file.path.read_text("utf-8") == file.text, "run python -m quire.observability.build"


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_expressions_speak_of_series_and_labels_that_exist(
    board: Dashboard, known_series: dict[str, set[str]]
) -> None:
    for expression in expressions(board):
        found = references(expression.expression)
        assert found.selectors
        for selector in found.selectors:
            assert selector.labels <= known_series[selector.name], selector.text
        labels = set().union(*(known_series[selector.name] for selector in found.selectors))
        assert found.grouping <= labels, expression


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_counters_are_shown_as_rates(board: Dashboard) -> None:
    for expression in expressions(board):
        following = re.findall(r"\w+(?:_total|_bucket|_sum|_count)\b(?:{[^}]*})?(.)", expression.expression)
        assert set(following) <= {"["}, expression


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_every_panel_has_a_description(board: Dashboard) -> None:
    panels = panels_of(board)
    assert all(panel.title and panel.targets for panel in panels)
    assert all((panel.description or "").endswith(".") for panel in panels)
    repeated = [title for title, count in Counter(panel.title for panel in panels).items() if count > 1]
    assert repeated == []


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_fill_the_grid_without_overlap(board: Dashboard) -> None:
    shown = json.loads(to_json(board))
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"])
    boxes = [panel["gridPos"] for panel in shown["panels"]]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    assert not [pair for pair in combinations(boxes, 2) if _overlap(*pair)]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_boards_work_with_any_datasource(board: Dashboard) -> None:
    shown = json.loads(to_json(board))
    uids = {panel["datasource"]["uid"] for panel in shown["panels"] if panel["type"] != "row"}
    assert uids == {"${datasource}"}
    variables = {variable["name"] for variable in shown["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(e.expression for e in expressions(board))))
    assert used <= variables | {"__rate_interval"}


def test_the_ttft_board_shows_every_phase_in_order() -> None:
    (board,) = (board for board in BOARDS if board.uid == "quire-ttft")
    means = [re.search(r'_sum{phase="(\w+)"}', e.expression) for e in expressions(board)]
    assert [mean[1] for mean in means if mean] == [*ROUTER_PHASES, *PROMPT_PHASES, *HAND_OVER]
    shown = {e.panel: e.expression for e in expressions(board)}
    assert "|".join((*ROUTER_PHASES, *PROMPT_PHASES)) in shown["p95 by phase, to the first token"]
    assert "|".join(HAND_OVER) in shown["p95 by phase, to the second"]


def _overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )
