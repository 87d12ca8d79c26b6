"""Builds the few forms of PromQL expressions that the boards use.

A quotient or a quantile without observations is NaN. A comparison drops it, so that a panel shows a gap
instead.
"""

from __future__ import annotations

INTERVAL = "$__rate_interval"


def selector(name: str, labels: str = "") -> str:
    """Return a selector; ``labels`` are its matchers."""
    return f"{name}{{{labels}}}" if labels else name


def rate(name: str, labels: str = "", by: str = "") -> str:
    """Return the summed rate of a counter, by some labels."""
    return f"sum{_by(by)}(rate({selector(name, labels)}[{INTERVAL}]))"


def total(name: str, labels: str = "", by: str = "") -> str:
    """Return the sum of a gauge, by some labels."""
    return f"sum{_by(by)}({selector(name, labels)})"


def quantile(share: float, histogram: str, labels: str = "", by: str = "") -> str:
    """Return a quantile of a histogram, by some labels."""
    buckets = rate(f"{histogram}_bucket", labels, f"le, {by}" if by else "le")
    return f"histogram_quantile({share}, {buckets}) >= 0"


def mean(histogram: str, labels: str = "", by: str = "") -> str:
    """Return the mean of a histogram, by some labels."""
    return quotient(rate(f"{histogram}_sum", labels, by), rate(f"{histogram}_count", labels, by))


def quotient(dividend: str, divisor: str) -> str:
    """Return a quotient of two expressions with the same labels."""
    return f"{dividend} / {divisor} >= 0"


def share_of_all(dividend: str, divisor: str) -> str:
    """Return the quotient of an expression with labels and one without."""
    return f"{dividend} / on() group_left() {divisor} >= 0"


def buckets(histogram: str) -> str:
    """Return a heatmap's columns."""
    return f"sum by (le) (increase({histogram}_bucket[{INTERVAL}]))"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
