"""What was measured, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from rich.table import Table


class Measurement(NamedTuple):
    """A workload's rounds on all sides.

    Attributes:
        model: name of the model.
        dtype: type of weights and arithmetic.
        workload: name of the workload.
        rates: tokens per second of each round, by side.
        first_tokens: by side, the share of answers whose first token is quire's; empty without quire.
    """

    model: str
    dtype: str
    workload: str
    rates: Mapping[str, Sequence[float]]
    first_tokens: Mapping[str, float]

    def medians(self) -> dict[str, float]:
        """Return the median rate of each side."""
        return {side: median(rates) for side, rates in self.rates.items()}

    def ratios(self) -> dict[str, float]:
        """Return how many times faster quire is than each other side: the median of the rounds' ratios.

        Both rates of a ratio are of one round, so what slows the machine for a while changes both.
        """
        if "quire" not in self.rates:
            return {}
        own = self.rates["quire"]
        return {
            side: median(mine / other for mine, other in zip(own, rates, strict=True))
            for side, rates in self.rates.items()
            if side != "quire"
        }

    def as_json(self) -> dict[str, Any]:
        """Return all fields, the medians and the ratios."""
        return {**self._asdict(), "medians": self.medians(), "ratios": self.ratios()}


def table(title: str, measurements: Sequence[Measurement], sides: Sequence[str]) -> Table:
    """Return the table of one model and type; a side without rates has empty cells."""
    others = [side for side in sides if side != "quire"] if "quire" in sides else []
    result = Table("tokens/s", *sides, *(f"quire / {side}" for side in others), "first tokens", title=title)
    for measurement in measurements:
        medians, ratios = measurement.medians(), measurement.ratios()
        result.add_row(
            measurement.workload,
            *(f"{medians[side]:.0f}" if side in medians else "" for side in sides),
            *(f"{ratios[side]:.2f}" if side in ratios else "" for side in others),
            " ".join(f"{side} {share:.0%}" for side, share in measurement.first_tokens.items()),
        )
    return result
