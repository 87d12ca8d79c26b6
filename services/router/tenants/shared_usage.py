"""Applies the limits of tenants to their usage on all routers that share a Redis."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from quire.kvindex.redis_index import Client
from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.shared_places import SharedPlaces
from quire.services.router.tenants.usage_store import LEASE_SECONDS, UsageStore
from quire.services.server.background import in_background

FLUSH_SECONDS = 0.1
"""Interval at which generated tokens are charged."""
FLUSHES_PER_BEAT = round(LEASE_SECONDS / 4 / FLUSH_SECONDS)


class SharedUsage:
    """The usage of tenants on all routers.

    While Redis does not answer, a router applies the limits to its own usage, which is not charged in Redis
    later.
    """

    def __init__(self, store: UsageStore) -> None:
        self._store = store
        self._unsent: defaultdict[Tenant, int] = defaultdict(int)
        """Generated tokens that have not been charged yet."""
        self._places: dict[str, SharedPlaces] = {}

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Charge generated tokens, within about ``FLUSH_SECONDS``."""
        self._unsent[tenant] += num_tokens

    async def take_tokens(self, tenant: Tenant, num_tokens: int) -> float | None:
        """Take a prompt's tokens.

        Returns:
            The seconds until they can be taken; 0: they were taken. None: Redis does not answer.
        """
        num_spent = self._unsent.pop(tenant, 0)
        return await self._store.take_tokens(tenant, num_tokens, num_spent=num_spent)

    def places(self, tenant: Tenant) -> SharedPlaces:
        """Return the places of a tenant that limits its running requests."""
        places = self._places.setdefault(tenant.name, SharedPlaces(tenant, self._store))
        places.tenant = tenant
        return places

    async def send_until_cancelled(self) -> None:
        """Send the charges, and renew the leases of the places."""
        for number in count(1):
            await asyncio.sleep(FLUSH_SECONDS)
            for tenant in list(self._unsent):
                await self._store.charge(tenant, self._unsent.pop(tenant))
            if number % FLUSHES_PER_BEAT == 0:
                for places in list(self._places.values()):
                    await places.record()


@asynccontextmanager
async def shared_usage(client: Client) -> AsyncIterator[SharedUsage]:
    """Yield the usage that a Redis keeps, until the context ends."""
    usage = SharedUsage(UsageStore(client))
    async with in_background(usage.send_until_cancelled()):
        yield usage
