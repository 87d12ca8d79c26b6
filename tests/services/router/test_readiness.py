"""What a router's probes say in each state of its workers, and what its requests do then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.protos import inference_pb2 as pb
from quire.rpc.health import READY, Health
from tests.testing.until import until

SECONDS = 10.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Probed:
    """A router and all that one can ask about its health."""

    def __init__(self, cluster: Any, http: ClientSession, channel: grpc.aio.Channel) -> None:
        self._cluster, self._http = cluster, http
        self._health = health_pb2_grpc.HealthStub(channel)
        self._watch = self._health.Watch(health_pb2.HealthCheckRequest())

    async def says(self, is_ready: bool, told: Health = READY) -> None:
        """Wait until all probes say the same; those of liveness are green all the time.

        Args:
            told: the status and the reason, if the router is not ready.
        """
        running = self._cluster.running
        metrics = f"http://127.0.0.1:{running.metrics_port}"
        async with asyncio.timeout(SECONDS):
            while (await self._watch.read()).status != (SERVING if is_ready else NOT_SERVING):
                pass
        call = self._health.Check(health_pb2.HealthCheckRequest())
        assert dict(await call.trailing_metadata()) == {
            "quire-status": told.status,
            "quire-reason": told.reason,
        }
        assert (await call).status == (SERVING if is_ready else NOT_SERVING)
        for url in (f"http://{running.http.address}/ready", f"{metrics}/ready"):
            async with self._http.get(url) as ready:
                assert ready.status == (200 if is_ready else 503)
                assert await ready.json() == told._asdict()
        for url in (f"http://{running.http.address}/health", f"{metrics}/health"):
            async with self._http.get(url) as health:
                assert health.status == 200
        assert self._cluster.metric("quire_ready") == is_ready

    def close(self) -> None:
        self._watch.cancel()


@pytest.fixture
async def probed(cluster: Any) -> AsyncIterator[Probed]:
    """A router with one prefill and two decode workers."""
    for name, role in {"p1": "prefill", "d1": "decode", "d2": "decode"}.items():
        await cluster.add(name, role)
    cluster.stub = await cluster.start(http_port=0, worker_wait_seconds=SECONDS, silent_seconds=60.0)
    async with ClientSession() as http, grpc.aio.insecure_channel(cluster.running.address) as channel:
        probed = Probed(cluster, http, channel)
        await probed.says(is_ready=True)
        yield probed
        probed.close()


def ask(cluster: Any) -> asyncio.Task[Any]:
    generation = pb.Generation(token_ids=pb.TokenIds(ids=range(2, 12)))
    call = cluster.stub.Generate(pb.GenerateRequest(generation=generation), timeout=SECONDS)
    return asyncio.ensure_future(call)


async def waits(cluster: Any) -> None:
    await until(lambda: cluster.metric("quire_router_requests_waiting"))


async def change(cluster: Any, role: str, **attributes: bool) -> None:
    """Change the workers of a role, and let the router ask them."""
    for worker in cluster.workers.values():
        if worker.role == role:
            for name, value in attributes.items():
                setattr(worker, name, value)
    for worker in cluster.running.workers.all():
        await cluster.running.workers._probing.ask(worker)
    await cluster.running.workers.refresh()


async def test_without_a_prefill_worker_a_router_is_ready_and_answers(cluster: Any, probed: Probed) -> None:
    for state in ({"is_stalled": True}, {"is_draining": True}):
        await change(cluster, "prefill", **state)
    await cluster["p1"].server.stop()
    await cluster.running.workers.refresh()
    assert (await ask(cluster)).choices
    assert cluster.running.server.health.is_ready


@pytest.mark.parametrize(("state", "word"), [("is_stalled", "stalled"), ("is_draining", "draining")])
async def test_while_no_decode_worker_can_serve_requests_wait_and_the_router_is_not_ready(
    state: str, word: str, cluster: Any, probed: Probed
) -> None:
    reason = f"no decode worker can serve: 2 {word}"
    await change(cluster, "decode", **{state: True})
    await probed.says(False, Health("not_ready", reason))
    request = ask(cluster)
    await waits(cluster)
    stalled = Health("stalled", f"{reason}; 1 request waits")
    await until(lambda: cluster.running.server.health == stalled)
    await change(cluster, "decode", **{state: False})
    await probed.says(is_ready=True)
    assert (await request).choices


async def test_while_all_decode_workers_are_set_aside_the_router_is_not_ready(
    cluster: Any, probed: Probed
) -> None:
    workers = cluster.running.workers
    for worker in workers.live("decode"):
        cluster[worker.worker_id].answers_probes.clear()
        workers.set_aside(worker)
    await probed.says(False, Health("not_ready", "no decode worker can serve: 2 set aside"))
    request = ask(cluster)
    await waits(cluster)
    for name in ("d1", "d2"):
        cluster[name].answers_probes.set()
    await probed.says(is_ready=True)
    assert (await request).choices


async def test_the_router_is_ready_with_one_decode_worker(cluster: Any, probed: Probed) -> None:
    cluster["d1"].is_stalled = True
    await cluster.running.workers._probing.ask(
        next(each for each in cluster.running.workers.all() if each.worker_id == "d1")
    )
    assert (await ask(cluster)).choices
    assert cluster.running.server.health.is_ready


async def test_a_request_on_the_only_decode_worker_that_is_silent_is_stalled(cluster: Any) -> None:
    """It is not set aside, since no other worker could take over, and yet nothing moves."""
    await cluster.add("d", "decode", is_quiet=True)
    cluster.stub = await cluster.start(silent_seconds=60.0)
    running = cluster.running
    (worker,) = running.workers.all()
    await until(lambda: running.server.health.is_ready)
    with running.workers.dispatched(worker):
        worker.health.passed(SECONDS)
        await until(lambda: running.server.health.status == "stalled")
        assert running.server.health.reason == "no decode worker can serve: 1 silent; 1 request waits"
        worker.health.heard()
        await until(lambda: running.server.health.is_ready)
