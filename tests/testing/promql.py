"""Reads the expressions of dashboards, and the series and labels that an expression refers to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import promql_parser
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from grafana_foundation_sdk.models.prometheus import Dataquery


class Expression(NamedTuple):
    """One expression of a board, and its place in the board."""

    board: str
    panel: str
    expression: str


class Selector(NamedTuple):
    """A series' name, the labels that it is chosen by, and its text."""

    name: str
    labels: frozenset[str]
    text: str


class References(NamedTuple):
    """The series that an expression refers to, and the labels that it groups or joins by."""

    selectors: tuple[Selector, ...]
    grouping: frozenset[str]


def references(expression: str) -> References:
    """Return the series and labels of an expression, which may have Grafana's ``$__rate_interval``.

    Raises:
        ValueError: the expression is not valid PromQL.
    """
    selectors: list[Selector] = []
    grouping: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            labels = frozenset(matcher.name for matcher in node.matchers.matchers)
            selectors.append(Selector(node.name or "", labels, f"{node.name}{node.matchers}"))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouping.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            grouping.update(matching.labels if matching is not None else ())
            grouping.update(node.modifier.group_labels or ())

    promql_parser.walk(promql_parser.parse(expression.replace("$__rate_interval", "1m")), visit)
    return References(tuple(selectors), frozenset(grouping))


def panels_of(board: Dashboard) -> list[Panel]:
    """Return a board's panels without the headings of its rows."""
    return [panel for panel in board.panels or () if isinstance(panel, Panel)]


def expressions(board: Dashboard) -> Iterator[Expression]:
    """Yield every expression."""
    for panel in panels_of(board):
        for target in panel.targets or ():
            assert isinstance(target, Dataquery)
            yield Expression(board.uid or "", panel.title or "", target.expr)
