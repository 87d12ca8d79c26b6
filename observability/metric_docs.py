"""Generates docs/metrics.md from the code that registers the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.observability.registries import DescribedMetric, described, router_registry, worker_registry
from quire.services.server.phases import Phase

_HEAD = """\
# Metrics

Written from the code by `python -m quire.observability.build`; a test keeps it up to date.

Each process serves its metrics for Prometheus over HTTP, at `/metrics` of its `--metrics-port`. Names end
with their unit; a counter ends with `_total`. Histograms have the series `_bucket`, `_count` and `_sum`.
Label values that are known before anything happens are shown, and are there with 0 once their metric is.
Metrics of a part that is off are absent: for example of the index without `--redis-url`. Those of moves and
copies of answers are there once the first worker has joined.
Prometheus adds `job` (`router`, `prefill` or `decode`) and `instance`; see [operations.md](operations.md)
for dashboards, alerts and traces.

## The phases of a request

`quire_request_phase_seconds` observes each of these once for each attempt, in the process in which it
passes. Those from `admit` to `prefill_compute` add up to the time to the first token, but for what the
network and the event loops take, and for a wait for a worker. The others come between the first token and
the second: a push runs beside the computation, and only what of it follows counts.

"""


def metrics_page() -> str:
    """Return the page."""
    router, worker = list(described(router_registry())), list(described(worker_registry()))
    common = [metric for metric in router if metric in worker]
    sections = [
        ("Router", [metric for metric in router if metric not in common]),
        ("Prefill and decode workers", [metric for metric in worker if metric not in common]),
        ("Every process", common),
    ]
    phases = "| Phase | |\n|---|---|\n" + "".join(f"| `{phase}` | {phase.text} |\n" for phase in Phase)
    return _HEAD + phases + "".join(f"\n## {title}\n\n{_table(metrics)}" for title, metrics in sections)


def _table(metrics: Iterable[DescribedMetric]) -> str:
    lines = ["| Name | Type | Labels | Meaning |", "|---|---|---|---|", *map(_row, metrics)]
    return "\n".join(lines) + "\n"


def _row(metric: DescribedMetric) -> str:
    labels = "<br>".join(_label(name, values) for name, values in metric.labels.items())
    return f"| `{metric.shown_name}` | {metric.kind} | {labels} | {metric.text} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`: {', '.join(values)}" if values else f"`{name}`"


def series(metrics: Iterable[DescribedMetric]) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the labels of every series."""
    for metric in metrics:
        extra = {"le"} if metric.kind == "histogram" else set()
        for name in metric.series:
            yield name, set(metric.labels) | (extra if name.endswith("_bucket") else set())
