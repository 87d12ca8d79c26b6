"""Asks a worker for its load."""

from __future__ import annotations

import grpc.aio

from quire.protos import worker_pb2
from quire.rpc.closed_channel import ChannelClosedError, closed_channel_errors
from quire.services.router.workers.worker import Worker


async def load_of(worker: Worker, seconds: float) -> worker_pb2.GetLoadResponse | None:
    """Return the load of a worker, or None if it does not answer within some seconds."""
    try:
        with closed_channel_errors():
            load: worker_pb2.GetLoadResponse = await worker.stub.GetLoad(
                worker_pb2.GetLoadRequest(), timeout=seconds
            )
            return load
    except (ChannelClosedError, grpc.aio.AioRpcError):
        return None
