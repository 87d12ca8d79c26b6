"""Lets the running requests end before the process of a worker ends.

The worker leaves the cluster and serves until every router has noticed. Then it refuses new requests and
waits for the running ones; routers move most of them to other workers (``services/router/migration/``). The
server allows ``grace_seconds`` for all this, and then cancels the wait (``rpc/server.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from quire.kvindex.publisher import BlockPublisher
from quire.rpc.ended_calls import end_calls
from quire.rpc.errors import DRAINING, Unavailable
from quire.services.worker.state import WorkerState

END_SECONDS = 1.0
"""Longest time for ended requests to send their last messages."""


async def drain_before_exit(
    state: WorkerState,
    running: Callable[[], list[asyncio.Task[Any]]],
    publisher: BlockPublisher | None,
    notice_seconds: float,
) -> None:
    """Leave the cluster and let the running requests end; if this is cancelled, end the remaining ones.

    Args:
        state: becomes DRAINED and then STOPPING.
        running: returns the tasks that serve requests.
        publisher: renews the worker's lease; None if no router finds the worker by itself.
        notice_seconds: how long the worker still accepts requests after it has given up its lease.
    """
    try:
        state.set_draining(True)
        if publisher is not None:
            await publisher.close()
        # Requests that routers send before they have noticed are served.
        await asyncio.sleep(notice_seconds)
        state.stop()
        # Running requests need their pushes, and pulls need their leases: the server accepts such calls.
        while tasks := running():
            await asyncio.wait(tasks)
    finally:
        state.stop()
        # If connections were cut, routers would think that one of these requests has crashed the worker.
        stopping = Unavailable("this worker stops; its time to drain is over", reason=DRAINING)
        await end_calls(running(), stopping, END_SECONDS)
