"""What the code says that processes report."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from quire.observability.metric_docs import metrics_page, series
from quire.observability.registries import RecordingRegistry, described, router_registry, worker_registry
from quire.services.server.phases import Phase


def test_a_metric_is_described_as_it_was_declared() -> None:
    registry = RecordingRegistry()
    Counter("quire_a_total", "An a.", ["kind"], registry=registry).labels("x")
    Histogram("quire_b_seconds", "A b.", registry=registry)
    counter, histogram = described(registry)
    assert (counter.shown_name, counter.kind, counter.text) == ("quire_a_total", "counter", "An a.")
    assert counter.labels == {"kind": ("x",)}
    assert dict(series([counter, histogram])) == {
        "quire_a_total": {"kind"},
        "quire_b_seconds_bucket": {"le"},
        "quire_b_seconds_count": set(),
        "quire_b_seconds_sum": set(),
    }


@pytest.mark.parametrize("make", [router_registry, worker_registry])
def test_names_carry_our_prefix_and_their_unit(make: type[CollectorRegistry]) -> None:
    metrics = list(described(make()))  # type: ignore[arg-type]
    ours = [metric for metric in metrics if not metric.name.startswith(("process_", "grpc_server_"))]
    assert all(metric.name.startswith("quire_") for metric in ours)
    assert all(metric.text.endswith(".") for metric in ours)
    histograms = [metric.name for metric in ours if metric.kind == "histogram"]
    assert all(name.endswith(("_seconds", "_tokens", "_blocks", "_ratio")) for name in histograms)


def test_the_page_names_every_phase_and_metric() -> None:
    page = metrics_page()
    assert all(f"| `{phase}` |" in page for phase in Phase)
    for registry in (router_registry(), worker_registry()):
        assert all(f"| `{metric.shown_name}`" in page for metric in described(registry))
