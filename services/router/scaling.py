"""Passes an operator's orders to start or end workers on to the process that has started the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

from quire.protos import admin_pb2 as pb
from quire.services.server.errors import FailedPrecondition, Unavailable


class _Call(NamedTuple):
    """A call that waits for its result."""

    request: pb.ScaleWorkersRequest
    result: asyncio.Future[pb.ScaleResult]


class Scaling:
    """Connects the calls that order workers with the launcher, the process that carries them out."""

    def __init__(self) -> None:
        self._launcher: asyncio.Queue[_Call] | None = None

    async def scale(self, request: pb.ScaleWorkersRequest) -> pb.ScaleWorkersResponse:
        """Let the launcher carry out an order; return what has changed.

        Raises:
            FailedPrecondition: there is no launcher, or it says why it cannot.
            Unavailable: the launcher ended meanwhile.
        """
        if self._launcher is None:
            raise FailedPrecondition(
                "this router cannot start workers: either `quire serve` is still starting, or it has not "
                "started this router, and you start and stop `quire prefill` and `quire decode` yourself",
                reason="NO_LAUNCHER",
            )
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._launcher.put_nowait(call)
        result = await call.result
        if result.problem:
            raise FailedPrecondition(result.problem, reason="NOT_SCALED")
        return pb.ScaleWorkersResponse(started=result.started, left=result.left)

    async def orders(self, results: AsyncIterator[pb.ScaleResult]) -> AsyncIterator[pb.ScaleWorkersRequest]:
        """Yield the orders to a launcher, each after the result of the one before."""
        calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._launcher = calls
        call: _Call | None = None
        try:
            while True:
                call = await calls.get()
                yield call.request
                with suppress(asyncio.InvalidStateError):  # the operator no longer waits
                    call.result.set_result(await anext(results))
        except StopAsyncIteration:
            return
        finally:
            if self._launcher is calls:
                self._launcher = None
            for each in (call, *_rest(calls)):
                if each is not None and not each.result.done():
                    each.result.set_exception(
                        Unavailable("the process that starts workers has ended", reason="NO_LAUNCHER")
                    )


def _rest(calls: asyncio.Queue[_Call]) -> list[_Call]:
    return [calls.get_nowait() for _ in range(calls.qsize())]
