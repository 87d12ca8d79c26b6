"""The metrics of a router and of a worker, as their processes register them, without running a process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric, ProcessCollector

from quire.engine.kv_cache.block_pool import BlockCounts
from quire.engine.scheduling.preemption import PreemptionCounts
from quire.engine.speculation.speculator import SpeculationCounts
from quire.kvindex.circuit_breaker import CircuitBreaker
from quire.kvindex.instrumented_index import IndexMetrics, PublisherMetrics
from quire.kvindex.publish_ledger import PublishLedger
from quire.kvtransfer.metrics import TransferMetrics
from quire.rpc.server import ErrorInterceptor
from quire.services.router.admin.roles import RoleMetrics
from quire.services.router.http.server import HttpMetrics
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.migration.copies import CopyMetrics
from quire.services.server.loop_lag import LoopLagMetrics
from quire.services.server.metrics_server import describe_readiness
from quire.services.worker.reports.metrics import (
    EngineCollector,
    EngineSnapshot,
    PromptMetrics,
    StepMetrics,
    TierSnapshot,
    describe_cache,
    describe_role,
)

SUFFIXES = {
    "counter": ("_total",),
    "info": ("_info",),
    "histogram": ("_bucket", "_count", "_sum"),
    "gauge": ("",),
}
"""The endings of the names of a metric's series, by type."""


class DescribedMetric(NamedTuple):
    """A metric as its code declares it; ``values`` are the values of a label before any event."""

    name: str
    kind: str
    text: str
    labels: dict[str, tuple[str, ...]]

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        return tuple(self.name + suffix for suffix in SUFFIXES[self.kind])

    @property
    def shown_name(self) -> str:
        """The name of the metric that the documentation shows."""
        return self.name if self.kind == "histogram" else self.series[0]


class RecordingRegistry(CollectorRegistry):
    """A registry that remembers what was registered, since labels are not part of what it collects."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[object] = []

    def register(self, collector: object) -> None:
        """Register and remember."""
        self.collectors.append(collector)
        super().register(collector)  # type: ignore[arg-type]


def router_registry() -> RecordingRegistry:
    """Return the metrics of a router with all features switched on."""
    registry = RecordingRegistry()
    RouterMetrics(registry)
    RoleMetrics(registry)
    IndexMetrics(registry, CircuitBreaker())
    HttpMetrics(registry)
    CopyMetrics(registry)
    _add_common(registry)
    return registry


def worker_registry() -> RecordingRegistry:
    """Return the metrics of a worker with all features switched on."""
    registry = RecordingRegistry()
    counts = (PreemptionCounts(0, 0), SpeculationCounts(0, 0))
    tiers = TierSnapshot({}, {}, {}, {}, {})
    idle = EngineSnapshot(0, 0, 0, 0, 0, BlockCounts(1, 0, 0), 0, 0.0, *counts, tiers)
    registry.register(EngineCollector(lambda: idle))
    StepMetrics(registry)
    PromptMetrics(registry)
    describe_role(registry, lambda: "decode")
    describe_cache(registry, block_size=16, num_blocks=1, block_bytes=1)
    TransferMetrics(registry)
    PublisherMetrics(registry, PublishLedger())
    _add_common(registry)
    return registry


def _add_common(registry: CollectorRegistry) -> None:
    LoopLagMetrics(registry)
    describe_readiness(registry, lambda: True)
    ErrorInterceptor(registry)
    ProcessCollector(registry=registry)


def described(registry: RecordingRegistry) -> Iterator[DescribedMetric]:
    """Yield the metrics of a registry, in the order in which they were registered."""
    for collector in registry.collectors:
        own_labels = getattr(collector, "_labelnames", ())
        for metric in collector.collect():  # type: ignore[attr-defined]
            names = own_labels or getattr(metric, "_labelnames", None) or ()
            yield DescribedMetric(metric.name, metric.type, metric.documentation, _labels(metric, names))


def _labels(metric: Metric, names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    if metric.type == "info":
        names = tuple(metric.samples[0].labels)
        return dict.fromkeys(names, ())
    return {
        name: tuple(dict.fromkeys(s.labels[name] for s in metric.samples if name in s.labels))
        for name in names
    }
