"""Receives the orders of ``quire admin scale`` from the routers, and answers them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import grpc

from quire.protos import admin_pb2 as pb
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.services.launch.mailbox import Mailbox

ANSWER_SECONDS = 5.0


class ScaleOrder(NamedTuple):
    """An order of an operator, and what tells the router its result."""

    num_workers: Mapping[str, int]
    answer: Callable[[pb.ScaleResult], None]


class ScaleOrders:
    """Follows the orders that reach the admin ports of this stack's routers.

    The stack connects to its routers, as ``quire admin`` does, and so needs no port of its own.
    """

    def __init__(self) -> None:
        self.arrived: Mailbox[ScaleOrder] = Mailbox()
        self._channels: dict[str, grpc.Channel] = {}
        self._threads: list[threading.Thread] = []

    def follow(self, router: str, address: str) -> None:
        """Take orders from a router's admin port until it ends; call this again when it is started again."""
        self._close(router)
        self._channels[router] = grpc.insecure_channel(address)
        stub = AdminServiceStub(self._channels[router])
        thread = threading.Thread(target=self._receive, args=(stub,), name="orders", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _receive(self, stub: AdminServiceStub) -> None:
        # It ends with the router, or when this stack closes the channel.
        with suppress(grpc.RpcError, ValueError):
            for order in stub.FollowScaleOrders(pb.FollowScaleOrdersRequest(), wait_for_ready=True):
                answer = partial(_answer, stub, order.number)
                self.arrived.put(ScaleOrder(dict(order.request.num_workers), answer))

    def _close(self, router: str) -> None:
        if channel := self._channels.pop(router, None):
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for router in list(self._channels):
            self._close(router)
        for thread in self._threads:
            thread.join()


def _answer(stub: AdminServiceStub, number: int, result: pb.ScaleResult) -> None:
    result.number = number
    # The router may have ended, and the operator's call with it.
    with suppress(grpc.RpcError, ValueError):
        stub.AnswerScaleOrder(result, timeout=ANSWER_SECONDS)
