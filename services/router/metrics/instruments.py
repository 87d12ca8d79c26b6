"""What measures the requests of a router."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.server.tracing import Tracer


class Instruments(NamedTuple):
    """Metrics, tracer and clock of a router."""

    metrics: RouterMetrics
    tracer: Tracer
    clock: Callable[[], float]
    """Returns seconds that never go back."""
