"""Puts load on a stack under a real Prometheus, so that all events of dashboards and alerts occur.

Two prefill and two decode workers with few blocks serve the demo model: requests wait for blocks, are
preempted, copy prefixes from peers, are cancelled, and lose a prefill worker during the run. Blocks move to
host memory and disk and back, draft tokens are verified, and some requests come over HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import NamedTuple

from quire.observability.build import BOARDS
from quire.services.local.config import LocalStackConfig
from quire.services.local.stack import local_stack
from quire.services.router.config import RouterConfig, SloTargets
from quire.services.worker.config import DiskFolder, WorkerConfig
from tests.testing.live_load import put_load
from tests.testing.prometheus import PrometheusClient, Series, free_ports, running_prometheus
from tests.testing.promql import Expression, expressions, references

SCRAPE_SECONDS = 1.0
WINDOW_SECONDS = 10
"""Value that replaces Grafana's $__rate_interval."""
NUM_WORKERS = 4
HOST_CACHE_BYTES = 1 << 20
DISK_CACHE_BYTES = 64 << 20


class LiveRun(NamedTuple):
    """A Prometheus that has scraped the stack under load, and the times of the load."""

    prometheus: PrometheusClient
    start: float
    end: float

    def series(self, expression: str) -> list[Series]:
        """Return the series that a dashboard would show for the time of the load."""
        return self.prometheus.query_range(with_variables(expression), self.start, self.end, SCRAPE_SECONDS)


class Finding(NamedTuple):
    """An expression and the problem with it."""

    expression: Expression
    problem: str


def with_variables(expression: str) -> str:
    """Return an expression as Grafana would send it with every worker chosen."""
    return expression.replace("$__rate_interval", f"{WINDOW_SECONDS}s").replace("$instance", ".*")


def findings(run: LiveRun) -> Iterator[Finding]:
    """Yield the dashboards' expressions that showed nothing, or something that is not a number."""
    for expression in (each for board in BOARDS for each in expressions(board)):
        series = run.series(expression.expression)
        if not series:
            yield Finding(expression, "empty")
        elif any(each.has_nan for each in series):
            yield Finding(expression, "NaN")


def absent_series(run: LiveRun) -> list[str]:
    """Return the series that alert rules use but no process reports."""
    asked = {s.text for rule in run.prometheus.rules() for s in references(rule["query"]).selectors}
    return [text for text in sorted(asked) if not run.prometheus.query(text)]


def _stack_config(base: int, disk: str) -> LocalStackConfig:
    """Return a stack in which all features that a dashboard shows are switched on."""
    return LocalStackConfig(
        num_prefill=2,
        num_decode=2,
        router=RouterConfig(
            port=0, http_port=0, metrics_port=base, copy_answers=True, slo=SloTargets(ttft_ms=250, tpot_ms=25)
        ),
        worker=WorkerConfig(
            role="decode",
            num_blocks=64,
            max_num_seqs=32,
            max_num_batched_tokens=128,
            host_cache_bytes=HOST_CACHE_BYTES,
            disk_cache=DiskFolder(disk, DISK_CACHE_BYTES),
            speculation="ngram",
        ),
        log_level="error",
    )


@contextmanager
def live_run(binary: str, seconds: float) -> Iterator[LiveRun]:
    """Start everything, put load on it for about ``seconds``, and yield the Prometheus that scraped it."""
    base = free_ports(NUM_WORKERS + 1)
    addresses = [f"127.0.0.1:{base + index}" for index in range(NUM_WORKERS + 1)]
    jobs = {"router": addresses[:1], "prefill": addresses[1:3], "decode": addresses[3:]}
    with (
        TemporaryDirectory() as disk,
        local_stack(_stack_config(base, disk)) as stack,
        running_prometheus(binary, jobs, SCRAPE_SECONDS) as prometheus,
    ):
        start = time.time()
        asyncio.run(put_load(stack, seconds))
        yield LiveRun(prometheus, start + WINDOW_SECONDS, time.time())
