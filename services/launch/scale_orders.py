"""Receives the orders of ``quire admin scale`` from the routers, and answers them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, Self

import grpc

from quire.protos import admin_pb2 as pb
from quire.protos.admin_pb2_grpc import AdminServiceStub
from quire.services.launch.mailbox import Mailbox


class ScaleOrder(NamedTuple):
    """An order of an operator; who carries it out puts one result into ``results``."""

    num_workers: Mapping[str, int]
    results: SimpleQueue[pb.ScaleResult | None]


class ScaleOrders:
    """Follows the orders that reach the admin ports of this stack's routers.

    The stack connects to its routers, as ``quire admin`` does, and so needs no port of its own.
    """

    def __init__(self) -> None:
        self.arrived: Mailbox[ScaleOrder] = Mailbox()
        self._channels: dict[str, grpc.Channel] = {}
        self._results: dict[str, SimpleQueue[pb.ScaleResult | None]] = {}
        self._threads: list[threading.Thread] = []

    def follow(self, router: str, address: str) -> None:
        """Take orders from a router's admin port until it ends; call this again when it is started again."""
        self._close(router)
        channel = self._channels[router] = grpc.insecure_channel(address)
        results = self._results[router] = SimpleQueue()
        thread = threading.Thread(target=self._receive, args=(channel, results), name="orders", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _receive(self, channel: grpc.Channel, results: SimpleQueue[pb.ScaleResult | None]) -> None:
        stub = AdminServiceStub(channel)
        try:
            for order in stub.FollowScaleOrders(_until_none(results), wait_for_ready=True):
                self.arrived.put(ScaleOrder(dict(order.num_workers), results))
        except (grpc.RpcError, ValueError):
            # The router has ended, or this stack has closed the channel.
            results.put(None)

    def _close(self, router: str) -> None:
        if channel := self._channels.pop(router, None):
            self._results.pop(router).put(None)
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


def _until_none(results: SimpleQueue[pb.ScaleResult | None]) -> Iterator[pb.ScaleResult]:
    while (result := results.get()) is not None:
        yield result
