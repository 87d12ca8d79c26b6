"""The latency targets: which requests count, and under which of the four results."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from quire.services.router.config import SloTargets
from quire.services.router.metrics.slo import SloMetrics

TTFT, TPOT = 1.0, 0.1
CLIENTS_OWN = {
    *("CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"),
    *("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"),
}


class Setup:
    """The metrics of the targets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.slo = SloMetrics(self.registry, SloTargets(ttft_ms=1000 * TTFT, tpot_ms=1000 * TPOT))

    def counted(self) -> list[tuple[str, str]]:
        """Return the results that were counted, each as often as it was."""
        return [
            (sample.labels["ttft"], sample.labels["tpot"])
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "quire_slo_requests_total"
            for _ in range(int(sample.value))
        ]


seconds = st.none() | st.sampled_from([0.0, TPOT, TTFT]) | st.floats(0, 2)


@given(code=st.sampled_from([code.name for code in grpc.StatusCode]), ttft=seconds, tpot=seconds)
def test_each_request_counts_once_unless_the_client_ended_it(
    code: str, ttft: float | None, tpot: float | None
) -> None:
    setup = Setup()
    setup.slo.judge(code, ttft, tpot)
    if code in CLIENTS_OWN:
        assert setup.counted() == []
        return
    has_met_ttft = ttft is not None and ttft <= TTFT
    has_met_tpot = (tpot is None or tpot <= TPOT) and code == "OK"
    assert setup.counted() == [("met" if has_met_ttft else "missed", "met" if has_met_tpot else "missed")]


@pytest.mark.parametrize("target", ["ttft", "tpot"])
def test_the_targets_are_exported_in_seconds(target: str) -> None:
    value = Setup().registry.get_sample_value("quire_slo_target_seconds", {"target": target})
    assert value == {"ttft": TTFT, "tpot": TPOT}[target]
