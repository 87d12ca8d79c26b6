"""Passes an operator's orders to start or end workers on to the process that has started the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import count

from quire.protos import admin_pb2 as pb
from quire.rpc.errors import FailedPrecondition, Unavailable


@dataclass(eq=False, slots=True)
class _Launcher:
    """A process that carries out orders.

    Attributes:
        orders: those that it has not got yet.
        results: what calls wait for, by the order's number.
    """

    orders: asyncio.Queue[pb.FollowScaleOrdersResponse] = field(default_factory=asyncio.Queue)
    results: dict[int, asyncio.Future[pb.AnswerScaleOrderRequest]] = field(default_factory=dict)


class Scaling:
    """Connects the calls that order workers with the launcher, the process that carries them out."""

    def __init__(self) -> None:
        self._launchers: list[_Launcher] = []
        self._numbers = count(1)

    async def scale(self, request: pb.ScaleWorkersRequest) -> pb.ScaleWorkersResponse:
        """Let the launcher carry out an order; return what has changed.

        Raises:
            FailedPrecondition: there is no launcher, or it says why it cannot.
            Unavailable: the launcher ended meanwhile.
        """
        if not self._launchers:
            raise FailedPrecondition(
                "this router cannot start workers: either `quire serve` is still starting, or it has not "
                "started this router, and you start and stop `quire prefill` and `quire decode` yourself",
                reason="NO_LAUNCHER",
            )
        launcher, number = self._launchers[-1], next(self._numbers)
        launcher.results[number] = asyncio.get_running_loop().create_future()
        launcher.orders.put_nowait(pb.FollowScaleOrdersResponse(number=number, request=request))
        try:
            result = await launcher.results[number]
        finally:
            del launcher.results[number]
        if result.problem:
            raise FailedPrecondition(result.problem, reason="NOT_SCALED")
        return pb.ScaleWorkersResponse(started=result.started, left=result.left)

    def answer(self, result: pb.AnswerScaleOrderRequest) -> None:
        """Pass a launcher's result on to the call that waits for it, if it still does."""
        for launcher in self._launchers:
            waiting = launcher.results.get(result.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(result)

    async def orders(self) -> AsyncGenerator[pb.FollowScaleOrdersResponse]:
        """Yield the orders to a launcher; when it has gone, the calls that wait for it fail."""
        launcher = _Launcher()
        self._launchers.append(launcher)
        try:
            while True:
                yield await launcher.orders.get()
        finally:
            self._launchers.remove(launcher)
            for waiting in launcher.results.values():
                if not waiting.done():
                    gone = "the process that starts workers has ended"
                    waiting.set_exception(Unavailable(gone, reason="NO_LAUNCHER"))
