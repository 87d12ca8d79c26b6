"""Lets a limited number of a tenant's requests run at the same time on all routers together."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.usage_store import Outcome, UsageStore

POLL_SECONDS = 0.05
"""Interval at which the first request in line asks whether other routers have freed places."""


class PlacesRefusedError(Exception):
    """The places are taken, and no more requests may wait."""


class SharedPlaces:
    """One router's part of a tenant's places.

    The router's requests get their places in order of arrival. Requests of different routers that wait at the
    same time get them in any order. While Redis does not answer, the limits apply to this router's requests.

    Args:
        tenant: its present limits; replaced when the key file changes.
        store: the places of all routers.
    """

    def __init__(self, tenant: Tenant, store: UsageStore) -> None:
        self.tenant = tenant
        self._store = store
        self._num_running = 0
        self._waiting: deque[object] = deque()
        """The requests that the store has queued, oldest first."""
        self._asking = asyncio.Lock()
        """Locked during a call to the store, which sends the present numbers and may change them."""
        self._has_left = asyncio.Event()
        """Replaced by a new one when a request leaves."""
        self._is_recorded = False
        """Whether the store may have numbers other than zero."""

    async def enter(self, num_places: int) -> None:
        """Acquire places; wait until they are free and earlier requests have theirs.

        Raises:
            PlacesRefusedError: they are taken, and no more requests may wait.
        """
        ticket = object()
        async with self._asking:
            outcome = await self._ask(num_places, len(self._waiting) + 1, is_new=True)
            if outcome is Outcome.REFUSED:
                raise PlacesRefusedError
            if outcome is Outcome.GRANTED:
                self._num_running += num_places
                return
            self._waiting.append(ticket)
        try:
            while True:
                with suppress(TimeoutError):
                    # wait_for of Python 3.11 loses a cancellation that comes together with the event.
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._has_left.wait()
                if self._waiting[0] is not ticket:
                    continue
                async with self._asking:
                    outcome = await self._ask(num_places, len(self._waiting), is_new=False)
                    if outcome is Outcome.GRANTED:
                        self._num_running += num_places
                        return
        finally:
            self._waiting.remove(ticket)

    async def leave(self, num_places: int) -> None:
        """Release places; on return, other routers can acquire them."""
        self._num_running -= num_places
        self._has_left.set()
        self._has_left = asyncio.Event()
        await self.record()

    async def record(self) -> None:
        """Renew the lease of this router's numbers, and correct them if a call was cancelled or failed."""
        async with self._asking:
            if not (self._is_recorded or self._num_running or self._waiting):
                return
            numbers = self._num_running, len(self._waiting)
            self._is_recorded = True
            outcome = await self._store.take_places(
                self.tenant, num_running=numbers[0], num_waiting=numbers[1]
            )
            self._is_recorded = any(numbers) or outcome is None

    async def _ask(self, num_places: int, num_waiting: int, *, is_new: bool) -> Outcome:
        self._is_recorded = True
        is_first = not (is_new and self._waiting)
        outcome = await self._store.take_places(
            self.tenant,
            num_running=self._num_running,
            num_waiting=num_waiting,
            wanted=num_places,
            is_new=is_new,
            is_first=is_first,
        )
        if outcome is not None:
            return outcome
        max_requests = self.tenant.max_requests
        if is_first and (max_requests is None or self._num_running + num_places <= max_requests):
            return Outcome.GRANTED
        if is_new and num_waiting > self.tenant.max_waiting:
            return Outcome.REFUSED
        return Outcome.WAITS
