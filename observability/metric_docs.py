"""Generates docs/metrics.md from the code that registers the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.observability.registries import DescribedMetric, described, router_registry, worker_registry
from quire.services.server.phases import Phase

_HEAD = """\
# Metrics

`python -m quire.observability.build` writes this page.

Each process serves its metrics for Prometheus at `/metrics` of its `--metrics-port`. Histograms have the
series `_bucket`, `_count` and `_sum`. Labels are shown with the values that are known in advance, whose
series begin at 0. A part that is off has no metrics, for example the index without `--redis-url`. Prometheus
adds `job` (`router`, `prefill` or `decode`) and `instance`. [operations.md](operations.md) explains
dashboards, alerts and traces.

## The phases of a request

`quire_request_phase_seconds` observes each phase in the process where it happens: `admit`, `tokenize` and
`turn` once for each request, the others once for each attempt. The phases from `admit` to `prefill_compute`
add up to the time to the first token, without the network, the event loops and a wait for a worker. The
others lie between the first token and the second. Embeddings have no phases, except in traces.

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
    lines = ["| Name and labels | Type | Meaning |", "|---|---|---|", *map(_row, metrics)]
    return "\n".join(lines) + "\n"


def _row(metric: DescribedMetric) -> str:
    lines = [f"`{metric.shown_name}`", *(_label(name, values) for name, values in metric.labels.items())]
    return f"| {'<br>'.join(lines)} | {metric.kind} | {metric.text} |"


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}`: {', '.join(values)}" if values else f"`{name}`"


def series(metrics: Iterable[DescribedMetric]) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the labels of every series."""
    for metric in metrics:
        extra = {"le"} if metric.kind == "histogram" else set()
        for name in metric.series:
            yield name, set(metric.labels) | (extra if name.endswith("_bucket") else set())
