"""Lets the requests of tenants begin in turn: one with many requests delays no other's first tokens.

The processes of the router and of the workers spend time on each request before its first token, which no
step divides among tenants. So while several tenants are here, two rules hold for a tenant that has more
requests than there are workers:

* At most as many of its requests as there are workers are under way to their first tokens.
* None of them begins while a request of a tenant that has used less is under way.

What a tenant has used is the time for which requests of it were under way, divided by its weight. It lags
behind the others by a limited credit (``fairness/shares.py``), and is gone when they have used so much since.

No request waits for ever: those that it waits for end at their deadlines at the latest, and their tenants use
time, until they have used more than its own. A tenant's requests begin in their order of arrival
(``fairness/patience.py``).
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from quire.fairness.shares import ServedTokens

CREDIT_SECONDS = 10.0
WAKE_SECONDS = 1.0
"""While requests wait, seconds between two looks at the time that requests under way have used since."""


class _Waiting(NamedTuple):
    """A request that waits for its turn."""

    due: float
    number: int
    """Orders equal times."""
    turn: asyncio.Future[None]
    num_tokens: int


class TenantTurns:
    """The requests that wait for their turn, and those that are under way to their first tokens.

    Args:
        num_workers: returns how many workers there are.
        clock: returns seconds.
    """

    def __init__(self, num_workers: Callable[[], int], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_workers = num_workers
        self._used = ServedTokens[str](1e6 * CREDIT_SECONDS)
        """The microseconds that each tenant has used."""
        self._counted_until = clock()
        self._weights: dict[str, int] = {}
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiting]] = {}
        """The waiting requests of tenants that have some, in their order."""
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        """Runs while requests wait."""

    async def begin(self, tenant: str, weight: int, num_tokens: int, due: float, seconds: float) -> Turn:
        """Return the turn of a request as soon as it may begin.

        Args:
            num_tokens: tokens of its prompt.
            due: its position in the order of its tenant's requests.
            seconds: time left until its deadline.

        Raises:
            TimeoutError: the deadline has passed.
        """
        self._count_time()
        self._used.join(tenant)
        self._weights[tenant] = weight
        entry = _Waiting(due, next(self._numbers), asyncio.get_running_loop().create_future(), num_tokens)
        insort(self._waiting.setdefault(tenant, []), entry)
        self._wake()
        try:
            async with asyncio.timeout(seconds):
                await entry.turn
        except BaseException:
            if entry.turn.done() and not entry.turn.cancelled():
                self.end(tenant)
            elif entry in (waiting := self._waiting.get(tenant, [])):
                waiting.remove(entry)
                self._wake()
            raise
        return Turn(self, tenant)

    def num_waiting_tokens(self, tenant: str) -> int:
        """Return how many prompt tokens of a tenant wait for their turn."""
        return sum(entry.num_tokens for entry in self._waiting.get(tenant, ()))

    def end(self, tenant: str) -> None:
        """Count a request out that is no longer under way, and let others begin."""
        self._count_time()
        self._under_way -= {tenant: 1}
        self._wake()

    def _count_time(self) -> None:
        """Count the time since the last call as used by each tenant with requests under way."""
        begin, self._counted_until = self._counted_until, self._clock()
        for tenant in self._under_way:
            self._used.serve(tenant, round(1e6 * (self._counted_until - begin)), self._weights[tenant])

    def _wake(self) -> None:
        """Let those waiting requests begin that may; the tenant that has used the least comes first."""
        for tenant in sorted(self._waiting, key=self._used.level):
            waiting = self._waiting[tenant]
            while waiting and self._may_begin(tenant, len(waiting)):
                # A request that was cancelled may not have removed itself yet.
                if not (entry := waiting.pop(0)).turn.done():
                    entry.turn.set_result(None)
                    self._under_way[tenant] += 1
            if not waiting:
                del self._waiting[tenant]
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAKE_SECONDS, self._wake_later)

    def _wake_later(self) -> None:
        self._timer = None
        self._count_time()
        self._wake()

    def _may_begin(self, tenant: str, num_waiting: int) -> bool:
        if self._used.lowest(but={tenant}) is None and self._under_way.keys() <= {tenant}:
            return True
        num_under_way, most = self._under_way[tenant], max(1, self._num_workers())
        if num_under_way + num_waiting <= most:
            return True
        level = self._used.level(tenant)
        return num_under_way < most and all(
            self._used.level(other) >= level for other in self._under_way if other != tenant
        )


@dataclass(eq=False)
class Turn:
    """A request that is under way to its first token."""

    turns: TenantTurns
    tenant: str

    def end(self) -> None:
        """Let other requests begin; call this once."""
        self.turns.end(self.tenant)
