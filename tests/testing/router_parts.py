"""Parts of a router for tests that run none: memberships, background tasks and charges."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from quire.services.router.execution.token_charge import AttemptCharge, RequestCharge
from quire.services.router.workers.membership import Member, MembershipLost


def free_charge() -> AttemptCharge:
    """Return a charge that no tenant pays."""
    return AttemptCharge(RequestCharge(lambda num_tokens: None, 0))


class ScriptedMembership:
    """A list of workers that the test sets; None is a lost source."""

    def __init__(self, *members: Member) -> None:
        self.current: Sequence[Member] | None = members

    async def members(self) -> Sequence[Member]:
        if self.current is None:
            raise MembershipLost("down")
        return self.current


class Spawned:
    """Tasks that run beyond their caller's end."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(coroutine))
        return self.tasks[-1]
