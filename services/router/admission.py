"""Which requests may run now: so many in all, and of each tenant what its limits say."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.services.errors import DeadlineExceeded, ResourceExhausted
from quire.services.router.metrics import RouterMetrics
from quire.services.router.tenants import Tenant
from quire.services.router.token_bucket import TokenBucket

RETRY_AFTER_SECONDS = 1.0
BATCH_CONCURRENCY = 32
"""Generations of one call that are under way at once; each counts as a request."""


class Allowance:
    """What one admitted request may still spend of its tenant's tokens."""

    def __init__(self, tenant: Tenant, bucket: TokenBucket | None, metrics: RouterMetrics) -> None:
        self._tenant = tenant
        self._bucket = bucket
        self._metrics = metrics

    def spend_prompt(self, num_tokens: int) -> None:
        """Pay for a prompt, beforehand.

        Raises:
            ResourceExhausted: the tenant has no tokens left; the retry's time is exact.
        """
        if self._bucket is None:
            return
        if seconds := self._bucket.wait_seconds(num_tokens):
            self._metrics.rejections.labels("tenant_tokens").inc()
            limit = self._bucket.tokens_per_minute
            raise ResourceExhausted(
                f"the limit of {limit} tokens a minute is reached; try again in {seconds:.1f} s",
                reason="TOKEN_RATE",
                metadata={"tenant": self._tenant.name, "limit": str(limit)},
                retry_after_seconds=seconds,
            )
        self._bucket.spend(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Pay for generated tokens."""
        if self._bucket is not None:
            self._bucket.spend(num_tokens)


class Admission:
    """Admits requests of the gRPC and the HTTP API alike.

    Limits hold within one router: of two routers, each admits as much.
    """

    def __init__(self, max_requests: int, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._metrics = metrics
        self._clock = clock
        self._num_requests = 0
        self._gates: dict[str, _Gate] = {}
        self._buckets: dict[str, TokenBucket] = {}

    def num_at_once(self, tenant: Tenant) -> int:
        """Return how many generations of one call may run: not so many that they refuse each other."""
        return min(BATCH_CONCURRENCY, self._max_requests, tenant.max_requests or BATCH_CONCURRENCY)

    @asynccontextmanager
    async def admitted(self, tenant: Tenant, deadline: float) -> AsyncIterator[Allowance]:
        """Admit a request, at once or after some of its tenant's have ended, until the context ends.

        Args:
            deadline: a reading of the clock.

        Raises:
            ResourceExhausted: a limit is reached.
            DeadlineExceeded: the request's time was over before it could begin.
        """
        if self._num_requests >= self._max_requests:
            raise self._refusal("max_requests", "OVERLOADED", self._max_requests, "requests are under way")
        allowance = Allowance(tenant, self._bucket(tenant), self._metrics)
        # Who is in debt is refused before its prompt is tokenized.
        allowance.spend_prompt(0)
        self._num_requests += 1
        self._metrics.requests_running.inc()
        try:
            async with self._passed_gate(tenant, deadline):
                yield allowance
        finally:
            self._num_requests -= 1
            self._metrics.requests_running.dec()

    @asynccontextmanager
    async def _passed_gate(self, tenant: Tenant, deadline: float) -> AsyncIterator[None]:
        if tenant.max_requests is None:
            yield
            return
        gate = self._gates.setdefault(tenant.name, _Gate())
        gate.resize(tenant.max_requests)
        if gate.is_full and gate.num_waiting >= tenant.max_waiting:
            raise self._refusal(
                "tenant_requests",
                "TENANT_REQUESTS",
                tenant.max_requests,
                f"requests of tenant {tenant.name} are under way",
            )
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await gate.enter()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request's deadline passed while {tenant.max_requests} others of its tenant were running"
            ) from None
        try:
            yield
        finally:
            gate.leave()

    def _bucket(self, tenant: Tenant) -> TokenBucket | None:
        if tenant.tokens_per_minute is None:
            self._buckets.pop(tenant.name, None)
            return None
        bucket = self._buckets.get(tenant.name)
        if bucket is None or bucket.tokens_per_minute != tenant.tokens_per_minute:
            bucket = self._buckets[tenant.name] = TokenBucket(tenant.tokens_per_minute, self._clock)
        return bucket

    def _refusal(self, label: str, reason: str, limit: int, what: str) -> ResourceExhausted:
        self._metrics.rejections.labels(label).inc()
        return ResourceExhausted(
            f"{limit} {what}, the most that this router takes; try again",
            reason=reason,
            metadata={"limit": str(limit)},
            retry_after_seconds=RETRY_AFTER_SECONDS,
        )


class _Gate:
    """Lets a number of requests run at once; the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._num_places = 0
        self._num_inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        return self._num_inside >= self._num_places

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def resize(self, num_places: int) -> None:
        self._num_places = num_places
        self._call_next()

    async def enter(self) -> None:
        if not self.is_full and not self._waiting:
            self._num_inside += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The place came together with the cancellation: it is the next one's.
                self.leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        self._num_inside -= 1
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting and not self.is_full:
            turn = self._waiting.popleft()
            if not turn.done():  # who was cancelled has not come to remove itself yet
                self._num_inside += 1
                turn.set_result(None)
