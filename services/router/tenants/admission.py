"""Decides which requests may run now: at most a fixed number of answers in all, within each tenant's limits.

A request takes one place for each answer that it asks for, because each answer is a sequence on a worker.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.rpc.errors import InvalidArgument
from quire.services.requests.validation import ONE_ANSWER, Answers
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.limits import Allowance, TenantLimits, limit_reached
from quire.services.router.tenants.shared_usage import SharedUsage

BATCH_CONCURRENCY = 32
"""Maximum number of generations of one call that run at the same time."""


class Admission:
    """Admits the requests of both the gRPC and the HTTP API.

    Args:
        max_requests: most answers under way on this router.
        metrics: counts running and refused requests.
        clock: monotonic clock in seconds.
        usage: tenants' usage on all routers; None: their limits apply to this router only.
    """

    def __init__(
        self,
        max_requests: int,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        usage: SharedUsage | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._metrics = metrics
        self._tenant_limits = TenantLimits(metrics, clock, usage)
        self._num_answers = 0

    def num_at_once(self, tenant: Tenant, num_answers: int) -> int:
        """Return how many generations of one call may run at once without exceeding a limit together.

        Args:
            num_answers: the largest number of answers that any of them asks for.
        """
        return max(1, min(BATCH_CONCURRENCY, self._limit(tenant) // num_answers))

    @asynccontextmanager
    async def admitted(
        self, tenant: Tenant, deadline: float, answers: Answers = ONE_ANSWER
    ) -> AsyncIterator[Allowance]:
        """Admit a request until the context ends; if its tenant is at its limit, first wait for a free place.

        Args:
            deadline: a reading of the clock.

        Raises:
            InvalidArgument: the request asks for more answers than a limit ever allows.
            ResourceExhausted: a limit is reached.
            DeadlineExceeded: the deadline passed before the request could begin.
        """
        if 1 < answers.number > (limit := self._limit(tenant)):
            raise InvalidArgument(
                answers.field,
                f"must be at most {limit}, since each answer counts as a request under way; "
                f"got {answers.number}",
                metadata={"limit": str(limit)},
            )
        if self._num_answers + answers.number > self._max_requests:
            self._metrics.rejections.labels("max_requests").inc()
            raise limit_reached(self._max_requests, "requests are under way", "OVERLOADED")
        self._num_answers += answers.number
        self._metrics.requests_running.inc()
        counts = self._metrics.tenants[tenant.name]
        counts.num_requests += 1
        try:
            # A tenant in debt is refused here, before its prompt is tokenized.
            allowance = await self._tenant_limits.allowance(tenant)
            async with self._tenant_limits.places(tenant, answers.number, deadline):
                yield allowance
        finally:
            self._num_answers -= answers.number
            self._metrics.requests_running.dec()
            counts.num_requests -= 1

    def _limit(self, tenant: Tenant) -> int:
        """Return the maximum number of a tenant's answers that can ever run at the same time."""
        return min(self._max_requests, tenant.max_requests or self._max_requests)
