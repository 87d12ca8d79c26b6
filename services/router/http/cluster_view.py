"""Serves a picture of the cluster: its workers, their blocks, and the blocks that travel between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from aiohttp import web
from pydantic import BaseModel

from quire.services.router.execution.cluster import Cluster
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.shared.bodies import json_response
from quire.services.router.workers.load import load_of
from quire.services.router.workers.worker import Worker

VIEW_SECONDS = 0.2
"""A view answers all requests of this time, so that many open pages cost the workers no more than one."""
LOAD_SECONDS = 0.5
"""A worker that does not tell its load in this time is shown without blocks."""


class BlockCounts(BaseModel):
    """The blocks of a worker: without content, with content that no request uses, and in use."""

    free: int
    cached: int
    used: int


class WorkerView(BaseModel):
    """A worker under its label, for example P1, since clients must not see ids and addresses."""

    label: str
    role: str
    state: Literal["serving", "draining", "silent"]
    requests: int | None = None
    """Requests that run, wait or get blocks, of all routers; null if the worker does not answer."""
    blocks: BlockCounts | None = None


class PushView(BaseModel):
    """This router's pushes from a prefill worker to a decode worker."""

    source: str
    target: str
    running: int
    blocks: int
    """Blocks pushed since both workers joined."""


class ClusterView(BaseModel):
    """The answer of ``/v1/cluster``."""

    requests: int
    """Requests under way in this router."""
    workers: list[WorkerView]
    pushes: list[PushView]


def viewing(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that sends the present view; before the first worker joins, it shows none."""
    turn, latest, taken_at = asyncio.Lock(), ClusterView(requests=0, workers=[], pushes=[]), 0.0

    async def view(request: web.Request) -> web.Response:
        nonlocal latest, taken_at
        async with turn:
            if (cluster := servicer.cluster) and time.monotonic() >= taken_at + VIEW_SECONDS:
                latest, taken_at = await _view(cluster, servicer.calls.number), time.monotonic()
            return json_response(latest)

    return view


async def _view(cluster: Cluster, num_requests: int) -> ClusterView:
    views = await asyncio.gather(*map(_worker_view, cluster.workers.all()))
    # Workers may have left or changed their roles while others answered.
    labels = {worker.worker_id: worker.label for worker in cluster.workers.all()}
    workers = [view for view in views if view.label in labels.values()]
    pushes = [
        PushView(source=source, target=target, running=count.num_running, blocks=count.num_blocks)
        for pair, count in cluster.pushes.counts.items()
        for source, target in [[labels[each] for each in pair]]
    ]
    return ClusterView(requests=num_requests, workers=workers, pushes=pushes)


async def _worker_view(worker: Worker) -> WorkerView:
    view = WorkerView(label=worker.label, role=worker.role, state="serving")
    if worker.health.is_draining:
        view.state = "draining"
    elif not worker.can_serve:
        view.state = "silent"
        return view
    if (load := await load_of(worker, LOAD_SECONDS)) is not None:
        view.requests = load.num_running + load.num_waiting + load.num_transferring
        view.blocks = BlockCounts(free=load.free_blocks, cached=load.cached_blocks, used=load.used_blocks)
    return view
