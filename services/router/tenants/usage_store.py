"""Stores the usage of tenants in Redis, so that their limits apply to all routers together.

Keys, all in one hash slot::

    {t}b<tenant>    HASH  level, at = the token bucket and when it had that level
    {t}r<tenant>    HASH  router -> its running places, its waiting requests, the end of its lease
"""

from __future__ import annotations

import asyncio
import secrets
from enum import StrEnum
from importlib.resources import files
from typing import Any

from quire.kvindex.circuit_breaker import CircuitBreaker
from quire.kvindex.guarded_index import NUM_AT_ONCE
from quire.kvindex.index import UNREACHABLE
from quire.kvindex.redis_index import Client
from quire.services.router.tenants.api_keys import Tenant
from quire.services.server.log import EventLogger

BUCKETS, RECORDS = "{t}b", "{t}r"

CALL_SECONDS = 0.1
"""Most time that Redis may take for one answer."""
LEASE_SECONDS = 5.0
"""Time for which the counts of a router that was killed are still counted."""

_log = EventLogger("router")


class Outcome(StrEnum):
    """The result of a request for places."""

    GRANTED = "granted"
    WAITS = "waits"
    REFUSED = "refused"


class UsageStore:
    """The usage of all tenants over all routers that share a Redis.

    While Redis does not answer, its methods return None, at once or after ``CALL_SECONDS``. Only
    ``NUM_AT_ONCE`` calls are in Redis at the same time; the others wait, since a limit that is not asked for
    is no limit.
    """

    def __init__(self, client: Client) -> None:
        self._router_id = secrets.token_hex(8)
        self._take_tokens = _script(client, "take_tokens")
        self._take_places = _script(client, "take_places")
        self._breaker = CircuitBreaker()
        self._turns = asyncio.Semaphore(NUM_AT_ONCE)
        self._is_lost = False

    async def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Charge tokens that have been generated; the tenant may go into debt."""
        await self._tokens(tenant, num_tokens, wanted=-1)

    async def take_tokens(self, tenant: Tenant, num_tokens: int, *, num_spent: int) -> float | None:
        """Charge generated tokens, and take a prompt's tokens if enough are left.

        Returns:
            The seconds until they can be taken; 0: they were taken. None: Redis does not answer.
        """
        return await self._tokens(tenant, num_spent, wanted=num_tokens)

    async def take_places(
        self,
        tenant: Tenant,
        *,
        num_running: int,
        num_waiting: int,
        wanted: int = 0,
        is_new: bool = False,
        is_first: bool = False,
    ) -> Outcome | None:
        """Record how many places this router uses for a tenant, and acquire places for one more request.

        Args:
            num_running: places that this router's requests of the tenant have.
            num_waiting: this router's requests of the tenant that wait, including the one that asks.
            wanted: places that the request needs; 0: only record the numbers.
            is_new: whether the request has not been told to wait yet.
            is_first: whether none of this router's requests waits before it.

        Returns:
            None if Redis does not answer.
        """
        own = [self._router_id, num_running, num_waiting, wanted, int(is_new), int(is_first)]
        limits = [tenant.max_requests, tenant.max_waiting, round(1000 * LEASE_SECONDS)]
        answer = await self._call(self._take_places, RECORDS + tenant.name, [*own, *limits])
        return None if answer is None else Outcome(answer.decode())

    async def _tokens(self, tenant: Tenant, num_spent: int, *, wanted: int) -> float | None:
        args = [tenant.tokens_per_minute, num_spent, wanted]
        micros = await self._call(self._take_tokens, BUCKETS + tenant.name, args)
        return None if micros is None else micros / 1e6

    async def _call(self, script: Any, key: str, args: list[Any]) -> Any:
        """Return a script's answer, or None if Redis does not answer; log the first time and the return."""
        async with self._turns:
            return await self._call_now(script, key, args)

    async def _call_now(self, script: Any, key: str, args: list[Any]) -> Any:
        if not self._breaker.admits():
            return None
        try:
            async with asyncio.timeout(CALL_SECONDS):
                answer = await script(keys=[key], args=args)
        except (TimeoutError, *UNREACHABLE) as error:
            self._breaker.failed()
            if not self._is_lost:
                self._is_lost = True
                _log.warning(
                    "tenant_limits_separate",
                    error=f"{type(error).__name__}: {error}",
                    details="until Redis answers, this router applies tenants' limits to its own requests",
                )
            return None
        self._breaker.succeeded()
        if self._is_lost:
            self._is_lost = False
            _log.info("tenant_limits_shared")
        return answer


def _script(client: Client, name: str) -> Any:
    # register_script sends only the hash, and the text again when Redis has lost it.
    return client.register_script(files("quire.services.router.tenants").joinpath(f"{name}.lua").read_text())
