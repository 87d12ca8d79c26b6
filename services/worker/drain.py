"""How a worker drains: whether it takes requests, and how its process lets the running ones end.

An operator may drain a worker and take it back. A process that stops drains, too: it leaves the cluster and
serves until every router has noticed. Then it refuses new requests and waits for those that run; routers move
most of them to other workers (``services/router/moves.py``). Its server gives it ``grace_seconds`` for all
this and then cancels the wait (``rpc/server.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from quire.kvindex.publisher import BlockPublisher
from quire.rpc.ended_calls import end_calls
from quire.rpc.errors import DRAINING, Unavailable

END_SECONDS = 1.0
"""How long requests that are ended may take to tell their callers."""


class DrainState(Enum):
    """The states of a worker; an operator moves it between the first two, and nothing leaves the third."""

    SERVING = auto()
    DRAINED = auto()
    """Routers choose other workers, and move answers there; what they still send is served."""
    STOPPING = auto()
    """The process is about to end, and new requests are refused."""


class Drain:
    """The state of one worker.

    Args:
        announce: tells the routers that the worker drains, or no longer does.
    """

    def __init__(self, announce: Callable[[bool], None]) -> None:
        self._announce = announce
        self.state = DrainState.SERVING

    @property
    def is_draining(self) -> bool:
        """Whether routers should send requests to other workers."""
        return self.state is not DrainState.SERVING

    @property
    def is_stopping(self) -> bool:
        """Whether requests are refused because the process is about to end."""
        return self.state is DrainState.STOPPING

    def set_draining(self, is_draining: bool) -> None:
        """Announce the change if it is one; a worker that stops goes on stopping."""
        wanted = DrainState.DRAINED if is_draining else DrainState.SERVING
        if self.state not in (wanted, DrainState.STOPPING):
            self.state = wanted
            self._announce(is_draining)

    def stop(self) -> None:
        """Refuse new requests from now on."""
        self.state = DrainState.STOPPING

    def check_not_stopping(self) -> None:
        """Check that a new request may run.

        Raises:
            Unavailable: the process is about to end.
        """
        if self.is_stopping:
            raise Unavailable("this worker is stopping; send requests to another", reason=DRAINING)


async def drain_before_exit(
    drain: Drain,
    running: Callable[[], list[asyncio.Task[Any]]],
    publisher: BlockPublisher | None,
    notice_seconds: float,
) -> None:
    """Leave the cluster and let the running requests end; if this is cancelled, end those that remain.

    Args:
        drain: the worker's state, which becomes STOPPING.
        running: returns the tasks that serve requests.
        publisher: keeps the worker's lease; None: no router finds the worker by itself.
        notice_seconds: how long the worker still takes requests after it has given up its lease.
    """
    try:
        drain.set_draining(True)
        if publisher is not None:
            await publisher.close()
        # What routers send until they have noticed is served.
        await asyncio.sleep(notice_seconds)
        drain.stop()
        # Running requests need their pushes, and pulls need their leases: the server still takes such calls.
        while tasks := running():
            await asyncio.wait(tasks)
    finally:
        drain.stop()
        # A connection that is cut would look like a worker that one of these requests has ended.
        stopping = Unavailable("this worker stops; its time to drain is over", reason=DRAINING)
        await end_calls(running(), stopping, END_SECONDS)
