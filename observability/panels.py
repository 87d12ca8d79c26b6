"""Makes the panels of the dashboards with Grafana's own SDK.

In some groups of options, such as a legend or the colors of a heatmap, the SDK writes 0, false or an empty
string for each option that is not set. Grafana's own defaults of those are therefore repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import TypeAlias

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef("prometheus", "${datasource}")

Panel: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel


@dataclass(frozen=True)
class PanelSpec:
    """A panel as a board's file writes it.

    It has one of four contents: ``series``, expressions over time by their legends, in Grafana's
    ``{{label}}`` syntax; ``quantiles_of`` a histogram, with the ``target`` that the router was given;
    ``distribution_of`` a histogram, as a heatmap; or ``number``, the last value of an expression.
    """

    title: str
    description: str
    """What the panel shows and by which formula; Grafana shows it on hovering."""
    series: Mapping[str, str] = field(default_factory=dict)
    quantiles_of: str = ""
    target: str = ""
    distribution_of: str = ""
    number: str = ""
    unit: str = "short"
    """Grafana's name of the values' unit."""
    stacked: bool = False
    width: int = 8
    """In columns, of which a board has 24."""
    height: int = 8


def build_panel(spec: PanelSpec) -> Panel:
    """Return Grafana's panel."""
    query_format = PromQueryFormat.TIME_SERIES
    panel: Panel
    if spec.number:
        panel, series = _number(), {"": spec.number}
    elif spec.distribution_of:
        panel, query_format = _heatmap(spec.unit), PromQueryFormat.HEATMAP
        series = {"{{le}}": f"sum by (le) (increase({spec.distribution_of}_bucket[$__rate_interval]))"}
    else:
        panel, series = _chart(spec.stacked), {**spec.series, **_quantiles(spec)}
    panel.title(spec.title).description(spec.description).datasource(DATASOURCE).unit(spec.unit)
    for name, (legend, expression) in zip(ascii_uppercase, series.items(), strict=False):
        query = prometheus.Dataquery().ref_id(name).datasource(DATASOURCE).range().format(query_format)
        panel.with_target(query.expr(expression).legend_format(legend))
    return panel.span(spec.width).height(spec.height)


def _quantiles(spec: PanelSpec) -> Mapping[str, str]:
    if not spec.quantiles_of:
        return {}
    rates = f"sum by (le) (rate({spec.quantiles_of}_bucket[$__rate_interval]))"
    quantiles = {
        f"p{share * 100:g}": f"histogram_quantile({share}, {rates}) >= 0" for share in (0.5, 0.95, 0.99)
    }
    if spec.target:
        quantiles["target"] = f'max(quire_slo_target_seconds{{target="{spec.target}"}})'
    return quantiles


def _chart(is_stacked: bool) -> timeseries.Panel:
    stacking = options.StackingMode.NORMAL if is_stacked else options.StackingMode.NONE
    return (
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


def _number() -> stat.Panel:
    return (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.AREA)
    )


def _heatmap(unit: str) -> heatmap.Panel:
    colors = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges")
    return (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .color(colors.fill("dark-orange").exponent(0.5).steps(64))
    )
