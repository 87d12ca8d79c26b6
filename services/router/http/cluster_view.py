"""Serves a picture of the cluster: its workers, their blocks, and the blocks that travel between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from aiohttp import web
from pydantic import BaseModel

from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.shared.bodies import json_response

VIEW_SECONDS = 0.2
"""A view answers all requests of this time, so that many open pages cost the workers no more than one."""
LOAD_SECONDS = 0.5
"""A worker that does not tell its load in this time is shown without blocks."""

Shown = Literal["serving", "waiting", "draining", "silent"]
_SHOWN: dict[str, Shown] = {
    **{"serving": "serving", "waiting": "waiting", "draining": "draining"},
    **{"stalled": "silent", "silent": "silent", "set aside": "silent"},
}
"""What clients see of the states of ``WorkerSet.states``."""


class BlockCounts(BaseModel):
    """The blocks of a worker: without content, with content that no request uses, and in use."""

    free: int
    cached: int
    used: int


class WorkerView(BaseModel):
    """A worker under its label, for example P1, since clients must not see ids and addresses."""

    label: str
    role: str
    revision: str
    """Prefill and decode workers of one revision work together."""
    state: Shown
    """waiting: it gets no new requests because its revision lacks a worker of the other role."""
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
            if time.monotonic() >= taken_at + VIEW_SECONDS:
                latest, taken_at = await _view(servicer), time.monotonic()
            return json_response(latest)

    return view


async def _view(servicer: GenerationServicer) -> ClusterView:
    view = ClusterView(requests=servicer.calls.number, workers=[], pushes=[])
    if (cluster := servicer.cluster) is None:
        return view
    found = await cluster.workers.loads(LOAD_SECONDS)
    labels, states = {}, cluster.workers.states()
    for worker, load in found:
        labels[worker.worker_id] = worker.label
        shown = WorkerView(
            label=worker.label, role=worker.role, revision=worker.revision, state=_SHOWN[states[worker]]
        )
        if load is not None:
            shown.requests = load.num_running + load.num_waiting + load.num_transferring
            shown.blocks = BlockCounts(
                free=load.free_blocks, cached=load.cached_blocks, used=load.used_blocks
            )
        view.workers.append(shown)
    for (source, target), count in cluster.pushes.counts.items():
        # The attempt may use a worker that joined while the others were asked.
        if source in labels and target in labels:
            push = PushView(
                source=labels[source],
                target=labels[target],
                running=count.num_running,
                blocks=count.num_blocks,
            )
            view.pushes.append(push)
    return view
