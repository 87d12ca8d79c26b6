"""Follows one worker in a long-lived call, so that the router notices within two seconds that it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from quire.protos import worker_pb2
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from quire.services.router.workers.worker import Worker

REOPEN_SECONDS = 0.2
"""Pause before a call that has ended is opened again."""


async def watch_worker(
    worker: Worker,
    router_id: str,
    hear: Callable[[Worker, worker_pb2.WatchWorkerResponse], None],
    set_aside: Callable[[Worker], asyncio.Task[None]],
) -> None:
    """Pass on a worker's reports, and detect when its connection breaks, until cancelled.

    A worker that is killed closes its connections, which ends the call. If it vanishes without that, its
    reports stop (``silences.py``).

    Args:
        router_id: names this router's own requests, which the reported load leaves out.
        hear: called with each report.
        set_aside: called when the connection has broken; its task ends when the worker has answered a probe.
    """
    while True:
        connection = worker.connection
        try:
            with closed_channel_errors():
                call = connection.stub.WatchWorker(worker_pb2.WatchWorkerRequest(router_id=router_id))
                await connection.check(call)
                async for report in call:
                    hear(worker, report)
        except (grpc.aio.AioRpcError, ChannelClosedError):
            pass
        # If the router has replaced the connection itself, the worker answers.
        if worker.connection is connection:
            await asyncio.wait([set_aside(worker)])
        await asyncio.sleep(REOPEN_SECONDS)
