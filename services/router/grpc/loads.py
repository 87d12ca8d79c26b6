"""Asks all workers of a router for their loads."""

from __future__ import annotations

import asyncio

from quire.protos import worker_pb2
from quire.services.router.execution.cluster import Cluster
from quire.services.router.workers.worker import Worker, load_of


async def loads(cluster: Cluster, seconds: float) -> list[tuple[Worker, worker_pb2.GetLoadResponse | None]]:
    """Return the workers with their loads; None for one that takes no requests or is too slow."""

    async def ask(worker: Worker) -> worker_pb2.GetLoadResponse | None:
        may_answer = worker.can_serve or worker.health.is_draining
        return await load_of(worker, seconds) if may_answer else None

    workers = cluster.workers.all()
    found = zip(workers, await asyncio.gather(*map(ask, workers)), strict=True)
    # A worker may have left while others answered.
    present = cluster.workers.all()
    return [(worker, load) for worker, load in found if worker in present]
