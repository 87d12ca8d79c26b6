"""A process that knows what a worker tells everybody, and wants its prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2, worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub, add_WorkerServiceServicer_to_server
from quire.rpc.server import GrpcServer, Service, grpc_server
from tests.testing.decodes import StreamingWorker


class Intruder(StreamingWorker):
    """Passes a router's question on to a worker, and what the worker says back, with some changes."""

    def __init__(self, worker_address: str, **changes: Any) -> None:
        super().__init__()
        self.worker_address, self.changes = worker_address, changes
        self.num_asked = 0
        self.challenged = asyncio.Event()
        self.prompts: list[list[int]] = []

    async def GetWorkerInfo(self, request: Any, context: Any) -> worker_pb2.GetWorkerInfoResponse:
        self.num_asked += 1
        async with grpc.aio.insecure_channel(self.worker_address) as channel:
            info = await WorkerServiceStub(channel).GetWorkerInfo(request)
        for name, value in self.changes.items():
            setattr(info, name, value)
        if request.nonce:
            self.challenged.set()
        return worker_pb2.GetWorkerInfoResponse.FromString(info.SerializeToString())

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.DecodeResponse]:
        self.prompts.append(list(request.sequence.token_ids))
        yield worker_pb2.DecodeResponse(accepted=worker_pb2.Accepted())
        token = worker_pb2.SampledToken(token_id=300)
        output = worker_pb2.SequenceOutput(tokens=[token], finish_reason=inference_pb2.FINISH_REASON_LENGTH)
        await self.send(request, output)


def serving(intruder: Intruder, port: int = 0) -> AbstractAsyncContextManager[GrpcServer]:
    """Return a server of an intruder's."""
    service = Service(add_WorkerServiceServicer_to_server, intruder, "quire.v1.WorkerService")
    return grpc_server([service], port=port, registry=CollectorRegistry(), grace_seconds=0)
