"""Names the objects that all requests of a router share."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.routing.placement import Planner
from quire.services.requests.served_model import ServedModel
from quire.services.router.execution.attempt import Follower
from quire.services.router.execution.prefix_lookup import PrefixLookup
from quire.services.router.execution.pushes import Pushes
from quire.services.router.execution.suspects import Suspects
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.workers.queue import WorkerQueue
from quire.services.router.workers.tenant_turns import TenantTurns
from quire.services.router.workers.worker_set import WorkerSet
from quire.services.server.background import Spawn


@dataclass(frozen=True, slots=True)
class Cluster:
    """Objects that all requests of a router share."""

    model: ServedModel
    workers: WorkerSet
    queue: WorkerQueue
    turns: TenantTurns
    prefixes: PrefixLookup
    metrics: RouterMetrics
    spawn: Spawn
    """Starts a coroutine that may outlive its request."""
    planner: Planner
    suspects: Suspects
    pushes: Pushes
    followers: Sequence[Follower]
    """Features that follow each attempt."""
    clock: Callable[[], float] = time.monotonic
