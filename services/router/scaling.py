"""Passes an operator's orders to start or end workers on to the process that has started the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

from quire.protos import admin_pb2 as pb
from quire.services.server.errors import FailedPrecondition, Unavailable


class Scaling:
    """Connects the calls that order workers with the launcher, the process that carries them out."""

    def __init__(self) -> None:
        self._orders: asyncio.Queue[pb.ScaleOrder] | None = None
        self._results: dict[int, asyncio.Future[pb.ScaleResult]] = {}
        self._numbers = count(1)

    async def scale(self, request: pb.ScaleWorkersRequest) -> pb.ScaleWorkersResponse:
        """Let the launcher carry out an order; return what has changed.

        Raises:
            FailedPrecondition: there is no launcher, or it says why it cannot.
            Unavailable: the launcher ended meanwhile.
        """
        if self._orders is None:
            raise FailedPrecondition(
                "this router cannot start workers: either `quire serve` is still starting, or it has not "
                "started this router, and you start and stop `quire prefill` and `quire decode` yourself",
                reason="NO_LAUNCHER",
            )
        number = next(self._numbers)
        self._results[number] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait(pb.ScaleOrder(number=number, request=request))
        try:
            result = await self._results[number]
        finally:
            del self._results[number]
        if result.problem:
            raise FailedPrecondition(result.problem, reason="NOT_SCALED")
        return pb.ScaleWorkersResponse(started=result.started, left=result.left)

    def answer(self, result: pb.ScaleResult) -> None:
        """Pass a launcher's result on to the call that waits for it, if it still does."""
        waiting = self._results.get(result.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    async def orders(self) -> AsyncIterator[pb.ScaleOrder]:
        """Yield the orders to a launcher; when it has gone, the calls that wait for it fail."""
        orders = self._orders = asyncio.Queue()
        try:
            while True:
                yield await orders.get()
        finally:
            if self._orders is orders:
                self._orders = None
                for waiting in self._results.values():
                    if not waiting.done():
                        gone = "the process that starts workers has ended"
                        waiting.set_exception(Unavailable(gone, reason="NO_LAUNCHER"))
