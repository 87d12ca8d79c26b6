"""Decides which requests may run now: at most a fixed number of answers in all, and each tenant's own limits.

A request takes one place for each answer that it asks for, because each answer is a sequence on a worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.services.requests.validation import ONE_ANSWER, Answers
from quire.services.router.metrics import RouterMetrics
from quire.services.router.tenants import Tenant
from quire.services.router.token_bucket import TokenBucket
from quire.services.server.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted

RETRY_AFTER_SECONDS = 1.0
BATCH_CONCURRENCY = 32
"""Maximum number of generations of one call that run at the same time."""


class Allowance:
    """Charges the tokens of one admitted request to its tenant."""

    def __init__(self, tenant: Tenant, bucket: TokenBucket | None, metrics: RouterMetrics) -> None:
        self._tenant = tenant
        self._bucket = bucket
        self._metrics = metrics

    def spend_prompt(self, num_tokens: int) -> None:
        """Charge a prompt before it is computed.

        Raises:
            ResourceExhausted: the tenant has too few tokens left; ``retry_after_seconds`` is exact.
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
        """Charge generated tokens; the tenant may go into debt."""
        if self._bucket is not None:
            self._bucket.spend(num_tokens)


class Admission:
    """Admits the requests of both the gRPC and the HTTP API.

    Limits apply to each router separately: two routers together admit twice as much.
    """

    def __init__(self, max_requests: int, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._metrics = metrics
        self._clock = clock
        self._num_answers = 0
        self._gates: dict[str, _Gate] = {}
        self._buckets: dict[str, TokenBucket] = {}

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
            raise self._refusal("max_requests", "OVERLOADED", self._max_requests, "requests are under way")
        allowance = Allowance(tenant, self._bucket(tenant), self._metrics)
        # A tenant in debt is refused here, before its prompt is tokenized.
        allowance.spend_prompt(0)
        self._num_answers += answers.number
        self._metrics.requests_running.inc()
        try:
            async with self._passed_gate(tenant, deadline, answers.number):
                yield allowance
        finally:
            self._num_answers -= answers.number
            self._metrics.requests_running.dec()

    @asynccontextmanager
    async def _passed_gate(self, tenant: Tenant, deadline: float, num_places: int) -> AsyncIterator[None]:
        if tenant.max_requests is None:
            yield
            return
        gate = self._gates.setdefault(tenant.name, _Gate())
        gate.resize(tenant.max_requests)
        if not gate.has_room(num_places) and gate.num_waiting >= tenant.max_waiting:
            raise self._refusal(
                "tenant_requests",
                "TENANT_REQUESTS",
                tenant.max_requests,
                f"requests of tenant {tenant.name} are under way",
            )
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await gate.enter(num_places)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the request's deadline passed while {tenant.max_requests} others of its tenant were running"
            ) from None
        try:
            yield
        finally:
            gate.leave(num_places)

    def _limit(self, tenant: Tenant) -> int:
        """Return the maximum number of a tenant's answers that can ever run at the same time."""
        return min(self._max_requests, tenant.max_requests or self._max_requests)

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
    """A fixed number of places for requests; requests without a place wait in order of arrival."""

    def __init__(self) -> None:
        self._num_places = 0
        self._num_taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_room(self, num_places: int) -> bool:
        """Return whether a request could take its places now: no other waits, and enough are free."""
        return not self._waiting and self._num_taken + num_places <= self._num_places

    def resize(self, num_places: int) -> None:
        self._num_places = num_places
        self._call_next()

    async def enter(self, num_places: int) -> None:
        if self.has_room(num_places):
            self._num_taken += num_places
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_places, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The request got its places just before it was cancelled: pass them on to the next one.
                self.leave(num_places)
            else:
                if (num_places, turn) in self._waiting:
                    self._waiting.remove((num_places, turn))
                self._call_next()  # requests behind it may need fewer places
            raise

    def leave(self, num_places: int) -> None:
        self._num_taken -= num_places
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting:
            num_places, turn = self._waiting[0]
            # A waiting request that was cancelled may not have removed itself yet: skip it.
            if not turn.done():
                if self._num_taken + num_places > self._num_places:
                    return
                self._num_taken += num_places
                turn.set_result(None)
            self._waiting.popleft()
