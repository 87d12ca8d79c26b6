"""Enforces the limits of tenants: tokens per minute, and requests that run at the same time.

Routers that share a Redis enforce them together. Without Redis, and while it does not answer, each router
enforces them on its own requests: then two routers together admit twice as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from quire.rpc.errors import RETRY_AFTER_SECONDS, DeadlineExceeded, ResourceExhausted
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.fifo_semaphore import FifoSemaphore
from quire.services.router.tenants.shared_places import PlacesRefusedError, SharedPlaces
from quire.services.router.tenants.shared_usage import SharedUsage
from quire.services.router.tenants.token_bucket import TokenBucket

TENANT_REQUESTS = "TENANT_REQUESTS"
TOKEN_RATE = "TOKEN_RATE"
OWN_LIMITS = frozenset({TENANT_REQUESTS, TOKEN_RATE})
"""Reasons of refusals by a limit of the request's own tenant."""


def limit_reached(limit: int, what: str, reason: str) -> ResourceExhausted:
    """Return the error for a request that arrives while ``limit`` others run."""
    return ResourceExhausted(
        f"{limit} {what}, the most that this router takes; try again",
        reason=reason,
        metadata={"limit": str(limit)},
        retry_after_seconds=RETRY_AFTER_SECONDS,
    )


class Allowance:
    """Charges the tokens of one admitted request to its tenant.

    Args:
        bucket: this router's usage; None: the tenant has no limit.
        usage: the usage on all routers, which decides while it is known; None: there is only this router's.
        metrics: counts the tokens, and refused requests.
    """

    def __init__(
        self, tenant: Tenant, bucket: TokenBucket | None, usage: SharedUsage | None, metrics: RouterMetrics
    ) -> None:
        self._tenant = tenant
        self._bucket = bucket
        self._usage = usage
        self._metrics = metrics
        self._counts = metrics.tenants[tenant.name]

    async def spend_prompt(self, num_tokens: int) -> None:
        """Charge a prompt, and the already received part of answers, before they are computed.

        Raises:
            ResourceExhausted: the tenant has too few tokens left; ``retry_after_seconds`` is exact.
        """
        if self._bucket is not None:
            await self._take(self._bucket, num_tokens)
        self._counts.num_tokens += num_tokens

    async def _take(self, bucket: TokenBucket, num_tokens: int) -> None:
        seconds = None
        if self._usage is not None:
            seconds = await self._usage.take_tokens(self._tenant, num_tokens)
        if seconds is None:
            seconds = bucket.wait_seconds(num_tokens)
        if seconds:
            self._metrics.rejections.labels("tenant_tokens").inc()
            limit = bucket.tokens_per_minute
            raise ResourceExhausted(
                f"the limit of {limit} tokens a minute is reached; try again in {seconds:.1f} s",
                reason=TOKEN_RATE,
                metadata={"tenant": self._tenant.name, "limit": str(limit)},
                retry_after_seconds=seconds,
            )
        bucket.spend(num_tokens)

    def spend(self, num_tokens: int) -> None:
        """Charge generated tokens; the tenant may go into debt."""
        self._counts.num_tokens += num_tokens
        if self._bucket is not None:
            self._bucket.spend(num_tokens)
            if self._usage is not None:
                self._usage.charge(self._tenant, num_tokens)


class TenantLimits:
    """Applies the limits of all tenants.

    Args:
        metrics: counts refused requests.
        clock: monotonic clock in seconds.
        usage: the usage on all routers; None: the limits apply to this router only.
    """

    def __init__(
        self, metrics: RouterMetrics, clock: Callable[[], float], usage: SharedUsage | None = None
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._usage = usage
        self._semaphores: dict[str, FifoSemaphore] = {}
        self._buckets: dict[str, TokenBucket] = {}

    async def allowance(self, tenant: Tenant) -> Allowance:
        """Return what a new request charges its tokens to.

        Raises:
            ResourceExhausted: the tenant is in debt.
        """
        allowance = Allowance(tenant, self._bucket(tenant), self._usage, self._metrics)
        await allowance.spend_prompt(0)
        return allowance

    @asynccontextmanager
    async def places(self, tenant: Tenant, num_places: int, deadline: float) -> AsyncIterator[None]:
        """Reserve places for a request until the context ends; if too few are free, first wait for them.

        Args:
            deadline: a reading of the clock.

        Raises:
            ResourceExhausted: the places are taken, and no more requests may wait.
            DeadlineExceeded: the deadline passed before the places were free.
        """
        if tenant.max_requests is None:
            yield
            return
        within_deadline = asyncio.timeout(max(0.0, deadline - self._clock()))
        if self._usage is None:
            places = self._places_here(tenant, num_places, within_deadline)
        else:
            places = _places_everywhere(self._usage.places(tenant), num_places, within_deadline)
        counts = self._metrics.tenants[tenant.name]
        async with AsyncExitStack() as stack:
            counts.num_waiting += 1
            try:
                await stack.enter_async_context(places)
            except PlacesRefusedError:
                self._metrics.rejections.labels("tenant_requests").inc()
                what = f"requests of tenant {tenant.name} are under way"
                raise limit_reached(tenant.max_requests, what, TENANT_REQUESTS) from None
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the request's deadline passed while {tenant.max_requests} others of its tenant were "
                    "running"
                ) from None
            finally:
                counts.num_waiting -= 1
            yield

    @asynccontextmanager
    async def _places_here(
        self, tenant: Tenant, num_places: int, within_deadline: asyncio.Timeout
    ) -> AsyncIterator[None]:
        assert tenant.max_requests is not None
        semaphore = self._semaphores.setdefault(tenant.name, FifoSemaphore())
        semaphore.resize(tenant.max_requests)
        if not semaphore.has_room(num_places) and semaphore.num_waiting >= tenant.max_waiting:
            raise PlacesRefusedError
        async with within_deadline:
            await semaphore.enter(num_places)
        try:
            yield
        finally:
            semaphore.leave(num_places)

    def _bucket(self, tenant: Tenant) -> TokenBucket | None:
        if tenant.tokens_per_minute is None:
            self._buckets.pop(tenant.name, None)
            return None
        bucket = self._buckets.get(tenant.name)
        if bucket is None or bucket.tokens_per_minute != tenant.tokens_per_minute:
            bucket = self._buckets[tenant.name] = TokenBucket(tenant.tokens_per_minute, self._clock)
        return bucket


@asynccontextmanager
async def _places_everywhere(
    places: SharedPlaces, num_places: int, within_deadline: asyncio.Timeout
) -> AsyncIterator[None]:
    async with within_deadline:
        await places.enter(num_places)
    try:
        yield
    finally:
        await places.leave(num_places)
