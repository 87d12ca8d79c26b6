"""Real stacks of router, workers and Redis: prompts, connections, and the wait until no block is in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from random import Random

import grpc

from quire.client import AsyncClient
from quire.protos import worker_pb2 as pb
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.services.local.stack import RunningStack

StartStack = Callable[..., AbstractContextManager[RunningStack]]
IDLE_SECONDS = 20.0


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return Random(seed * 1000 + length).choices(range(2, 258), k=length)


@asynccontextmanager
async def connect(stack: RunningStack) -> AsyncIterator[tuple[AsyncClient, dict[str, WorkerServiceStub]]]:
    """Yield a client of the router and a stub of each worker."""
    async with AsyncClient(stack.address) as client:
        channels = {name: grpc.aio.insecure_channel(w.address) for name, w in stack.ready.items()}
        try:
            yield (
                client,
                {name: WorkerServiceStub(stack.peer(name, channel)) for name, channel in channels.items()},
            )
        finally:
            for channel in channels.values():
                await channel.close(None)


async def wait_until_idle(workers: dict[str, WorkerServiceStub]) -> dict[str, pb.GetLoadResponse]:
    """Wait until no worker's blocks are used or pinned, and return the loads; fail after 20 seconds."""
    async with asyncio.timeout(IDLE_SECONDS):
        while True:
            loads = {name: await stub.GetLoad(pb.GetLoadRequest()) for name, stub in workers.items()}
            if not any(load.used_blocks or load.pinned_blocks for load in loads.values()):
                return loads
            await asyncio.sleep(0.02)
