"""Counts the requests that met the latency targets (service level objectives) and those that missed them."""

from __future__ import annotations

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.services.router.config import SloTargets

RESULTS = ("met", "missed")

# The client caused a request to end with one of these codes, so it does not count for or against the service.
_CLIENTS_OWN = frozenset(
    code.name
    for code in (
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)


class SloMetrics:
    """Counts requests by the targets that they met; goodput is the share or rate of those that met both."""

    def __init__(self, registry: CollectorRegistry, targets: SloTargets) -> None:
        self._targets = targets
        target = Gauge(
            "quire_slo_target_seconds", "Configured target of the router.", ["target"], registry=registry
        )
        target.labels("ttft").set(targets.ttft_seconds)
        target.labels("tpot").set(targets.tpot_seconds)
        requests = Counter(
            "quire_slo_requests_total",
            "Requests that ended, by whether they met the targets, without those that failed because of the "
            "client or that a limit of their tenant refused.",
            ["ttft", "tpot"],
            registry=registry,
        )
        self._count = {
            (ttft == "met", tpot == "met"): requests.labels(ttft, tpot)
            for ttft in RESULTS
            for tpot in RESULTS
        }

    def judge(self, grpc_code: str, ttft_seconds: float | None, tpot_seconds: float | None) -> None:
        """Count a request that ended.

        Args:
            ttft_seconds: time to the first token; None if no token arrived, which misses the target.
            tpot_seconds: mean time for each further token; None if there was none, which meets the target.
        """
        if grpc_code in _CLIENTS_OWN:
            return
        has_met_ttft = ttft_seconds is not None and ttft_seconds <= self._targets.ttft_seconds
        has_met_tpot = tpot_seconds is None or tpot_seconds <= self._targets.tpot_seconds
        self._count[has_met_ttft, has_met_tpot and grpc_code == "OK"].inc()
