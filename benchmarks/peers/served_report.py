"""What was measured on servers, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table

from quire.cli.bench.summary import Summary

BASELINE = "vllm"
"""The side that all others are compared with."""


class Figures(NamedTuple):
    """What the clients of one round measured; TPOT is 0 if no answer has a second token."""

    tokens_per_second: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float


class ServedMeasurement(NamedTuple):
    """A workload's rounds on all sides.

    Attributes:
        model: name of the model.
        dtype: type of weights and arithmetic.
        workload: name of the workload.
        rounds: the figures of each round, by side.
    """

    model: str
    dtype: str
    workload: str
    rounds: Mapping[str, Sequence[Figures]]

    def medians(self) -> dict[str, Figures]:
        """Return the median of each figure, by side."""
        return {
            side: Figures(*map(median, zip(*rounds, strict=True))) for side, rounds in self.rounds.items()
        }

    def ratios(self) -> dict[str, Figures]:
        """Return each side's figures as multiples of the baseline's: the medians of the rounds' ratios.

        Both figures of a ratio are of one round, so what slows the machine for a while changes both.
        """
        if BASELINE not in self.rounds:
            return {}
        baseline = self.rounds[BASELINE]
        return {
            side: Figures(*(median(column) for column in zip(*map(ratio, rounds, baseline), strict=True)))
            for side, rounds in self.rounds.items()
            if side != BASELINE
        }

    def as_json(self) -> dict[str, Any]:
        """Return all fields, the medians and the ratios, with the names of the figures."""
        return {
            **self._asdict(),
            "rounds": {side: [each._asdict() for each in rounds] for side, rounds in self.rounds.items()},
            "medians": {side: each._asdict() for side, each in self.medians().items()},
            "ratios": {side: each._asdict() for side, each in self.ratios().items()},
        }


def figures_of(summary: Summary) -> Figures:
    """Return the figures of a round in which every request succeeded."""
    assert summary.ttft_ms is not None
    tpot = summary.tpot_ms.p50 if summary.tpot_ms else 0.0
    return Figures(summary.output_tokens_per_second, summary.ttft_ms.p50, summary.ttft_ms.p99, tpot)


def ratio(own: Figures, other: Figures) -> Figures:
    """Return each figure divided by the other's; 0 if the other's is 0."""
    return Figures(*(mine / theirs if theirs else 0.0 for mine, theirs in zip(own, other, strict=True)))


def served_table(title: str, measurements: Sequence[ServedMeasurement]) -> Table:
    """Return the table of one model and type: a row for each workload and side."""
    table = Table("workload", "side", title=title)
    for column in ("tokens/s", "TTFT p50 (ms)", "TTFT p99 (ms)", "TPOT p50 (ms)"):
        table.add_column(column, justify="right")
    for column in ("tokens/s", "TTFT p50", "TTFT p99", "TPOT"):
        table.add_column(f"{column} / {BASELINE}", justify="right")
    for measurement in measurements:
        ratios = measurement.ratios()
        for side, figures in measurement.medians().items():
            table.add_row(
                measurement.workload,
                side,
                f"{figures.tokens_per_second:.0f}",
                f"{figures.ttft_p50_ms:.1f}",
                f"{figures.ttft_p99_ms:.1f}",
                f"{figures.tpot_p50_ms:.2f}",
                *(f"{each:.2f}" for each in ratios.get(side, ())),
            )
        table.add_section()
    return table
