"""Shows the figures of a benchmark as a table for people and as one line of JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.table import Table

from quire.cli.bench.config import BenchConfig
from quire.cli.bench.summary import Distribution, Summary


def to_table(summary: Summary, address: str) -> Table:
    """Return the figures of one address as a table."""
    table = Table("", "mean", "p50", "p99", title=f"quire bench serve: {address}", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("Successful requests", f"{summary.num_succeeded} of {summary.num_requests}")
    for status, count in summary.failures.items():
        table.add_row(f"Failed: {status}", str(count))
    table.add_row("Duration (s)", f"{summary.duration_seconds:.2f}")
    table.add_row("Request throughput (req/s)", f"{summary.requests_per_second:.2f}")
    if summary.good_requests_per_second is not None:
        table.add_row("Goodput (req/s)", f"{summary.good_requests_per_second:.2f}")
        table.add_row("Requests within the limits", f"{summary.attainment:.1%}")
    table.add_row("Output token throughput (tok/s)", f"{summary.output_tokens_per_second:.1f}")
    table.add_row("Total token throughput (tok/s)", f"{summary.total_tokens_per_second:.1f}")
    table.add_row("Cached prompt tokens", f"{summary.cached_token_ratio:.1%}", end_section=True)
    _add_latency(table, "TTFT (ms)", summary.ttft_ms)
    _add_latency(table, "TPOT (ms)", summary.tpot_ms)
    _add_latency(table, "ITL (ms)", summary.itl_ms)
    _add_latency(table, "E2EL (ms)", summary.e2e_ms)
    return table


def to_json(summary: Summary, config: BenchConfig, compared: Summary | None = None) -> str:
    """Return settings and figures as one line of JSON, with those of a second address if there is one."""
    figures = {"bench": "serve", "config": asdict(config), **_rounded(asdict(summary))}
    if compared is not None:
        figures["compared"] = _rounded(asdict(compared))
    return json.dumps(figures, default=str)


def _add_latency(table: Table, label: str, latency: Distribution | None) -> None:
    if latency is None:
        table.add_row(label, "-", "-", "-")
    else:
        table.add_row(label, f"{latency.mean:.2f}", f"{latency.p50:.2f}", f"{latency.p99:.2f}")


def _rounded(figures: dict[str, object]) -> dict[str, object]:
    """Return the figures rounded to the digits that a measurement can have."""
    return {
        key: round(value, 6)
        if isinstance(value, float)
        else _rounded(value)
        if isinstance(value, dict)
        else value
        for key, value in figures.items()
    }
