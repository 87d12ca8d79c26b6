"""The kinds of panels of our dashboards, made with Grafana's own SDK.

In some groups of options, such as a legend or the colors of a heatmap, the SDK writes 0, false or an empty
string for each option that is not set. Grafana's own defaults of those are therefore repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import NamedTuple, TypeAlias, TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from quire.observability.promql import buckets, quantile

DATASOURCE = DataSourceRef("prometheus", "${datasource}")
WIDTH = 24
"""Columns of a dashboard."""

Panel: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel
P = TypeVar("P", timeseries.Panel, stat.Panel, heatmap.Panel)


class Target(NamedTuple):
    """An expression, and the legend of its series, in Grafana's ``{{label}}`` syntax."""

    expression: str
    legend: str


def chart(
    title: str, description: str, targets: Sequence[Target], unit: str = "short", *, is_stacked: bool = False
) -> timeseries.Panel:
    """Return a chart of expressions over time.

    Args:
        title: the heading.
        description: what the chart shows and by which formula; Grafana shows it on hovering.
        targets: the expressions.
        unit: Grafana's name of the values' unit.
        is_stacked: whether the series add up.
    """
    stacking = options.StackingMode.NORMAL if is_stacked else options.StackingMode.NONE
    panel = (
        timeseries.Panel()
        .min(0)
        .fill_opacity(40 if is_stacked else 5)
        .line_width(1)
        .show_points(options.VisibilityMode.NEVER)
        .stacking(common.StackingConfig().mode(stacking).group("A"))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(options.LegendDisplayMode.TABLE)
            .placement(options.LegendPlacement.BOTTOM)
            .calcs(["mean", "max"])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(options.TooltipDisplayMode.MULTI)
            .sort(options.SortOrder.DESCENDING)
        )
    )
    return _filled(panel, title, description, targets, unit)


def line(
    title: str,
    description: str,
    expression: str,
    legend: str,
    unit: str = "short",
    *,
    is_stacked: bool = False,
) -> timeseries.Panel:
    """Return a chart of one expression."""
    return chart(title, description, [Target(expression, legend)], unit, is_stacked=is_stacked)


def latency(title: str, histogram: str, description: str, target: str = "") -> timeseries.Panel:
    """Return a chart of a histogram's quantiles, with the target that the router was given."""
    targets = [Target(quantile(share, histogram), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99)]
    if target:
        targets.append(Target(f'max(quire_slo_target_seconds{{target="{target}"}})', "target"))
    return chart(title, description, targets, "s")


def number(title: str, description: str, expression: str, unit: str) -> stat.Panel:
    """Return the last value of an expression as a number."""
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.AREA)
    )
    return _filled(panel, title, description, [Target(expression, "")], unit).span(6).height(4)


def distribution(title: str, description: str, histogram_name: str, unit: str) -> heatmap.Panel:
    """Return the distribution of a histogram over time."""
    colors = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    panel = (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(colors.fill("dark-orange").exponent(0.5).steps(64))
    )
    targets = [Target(buckets(histogram_name), "{{le}}")]
    return _filled(panel, title, description, targets, unit, PromQueryFormat.HEATMAP)


def side_by_side(num_per_line: int, panels: Sequence[Panel]) -> Sequence[Panel]:
    """Return the panels with a width such that ``num_per_line`` of them fill a line."""
    return [panel.span(WIDTH // num_per_line) for panel in panels]


def _filled(
    panel: P,
    title: str,
    description: str,
    targets: Sequence[Target],
    unit: str,
    query_format: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> P:
    """Give a panel what all kinds have."""
    panel.title(title).description(description).datasource(DATASOURCE).unit(unit).span(8).height(8)
    for query in _queries(targets, query_format):
        panel.with_target(query)
    return panel


def _queries(targets: Sequence[Target], query_format: PromQueryFormat) -> Iterator[prometheus.Dataquery]:
    for name, target in zip(ascii_uppercase, targets, strict=False):
        query = prometheus.Dataquery().ref_id(name).datasource(DATASOURCE).range().format(query_format)
        yield query.expr(target.expression).legend_format(target.legend)
