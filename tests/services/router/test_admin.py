"""The admin port, with scripted workers."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from quire.client import DeadlineExceeded, NotFound, Unavailable, Unsupported
from quire.client.admin import AdminClient
from quire.protos import admin_pb2 as pb
from quire.protos import admin_pb2_grpc as pb_grpc
from quire.protos import inference_pb2 as inference_pb
from tests.testing.rpc_errors import error_of


async def test_workers_are_listed_with_or_without_a_known_load(pair: Any) -> None:
    await pair.start()
    with AdminClient(pair.running.admin_address) as admin:
        workers = await asyncio.to_thread(admin.workers)
    assert [(w.worker_id, w.role, w.is_draining) for w in workers] == [
        ("d1", "decode", False),
        ("d2", "decode", False),
        ("p1", "prefill", False),
        ("p2", "prefill", False),
    ]
    assert {w.load for w in workers} == {None}


async def test_an_infinite_timeout_never_passes(pair: Any) -> None:
    await pair.start()
    with AdminClient(pair.running.admin_address, timeout=math.inf) as admin:
        assert len(await asyncio.to_thread(admin.workers)) == 4


async def test_the_status_has_the_tenants_and_the_metrics_of_the_router(pair: Any, stub: Any) -> None:
    await stub.Generate(inference_pb.GenerateRequest(generation=inference_pb.Generation(text="say")))
    with AdminClient(pair.running.admin_address) as admin:
        status = await asyncio.to_thread(admin.status)
    [tenant] = status.tenants
    assert (tenant.name, tenant.num_requests, tenant.num_waiting) == ("", 0, 0)
    assert tenant.num_tokens > 0
    assert status.metrics_address == f"127.0.0.1:{pair.running.metrics_port}"
    assert {each.metrics_address for each in status.workers} == {""}


async def test_an_unknown_worker_is_named(pair: Any) -> None:
    await pair.start()
    with AdminClient(pair.running.admin_address) as admin, pytest.raises(NotFound, match="d1, d2, p1, p2"):
        await asyncio.to_thread(admin.drain, "d9")


async def test_a_drain_is_in_effect_when_it_returns_and_requests_are_refused(pair: Any) -> None:
    stub = await pair.start(poll_seconds=3600, worker_wait_seconds=0.05)
    request = inference_pb.GenerateRequest(generation=inference_pb.Generation(text="say"))
    with AdminClient(pair.running.admin_address) as admin:
        await asyncio.to_thread(admin.drain, "d1")
        assert [w.worker_id for w in pair.running.workers.live("decode")] == ["d2"]
        await asyncio.to_thread(admin.drain, "d2")
        await error_of(stub.Generate(request), text="all 2 decode workers are draining")
        await asyncio.to_thread(admin.drain, "d1", undo=True)
        await stub.Generate(request)


async def test_the_admin_port_is_apart_from_the_public_one(pair: Any) -> None:
    await pair.start()
    async with grpc.aio.insecure_channel(pair.running.address) as channel:
        caught = await error_of(pb_grpc.AdminServiceStub(channel).ListWorkers(pb.ListWorkersRequest()))
    assert caught.code() is grpc.StatusCode.UNIMPLEMENTED


class Launcher(pb_grpc.AdminServiceServicer):
    """Says that it has started two decode workers if asked to; three take too long, and four do not fit."""

    async def ScaleWorkers(self, request: pb.ScaleWorkersRequest, context: Any) -> pb.ScaleWorkersResponse:
        number = request.num_workers["decode"]
        if number > 3:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "decode-3 did not start: no memory")
        if number > 2:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        return pb.ScaleWorkersResponse(started=[f"decode-{index}" for index in range(number)])


async def test_scaling_is_passed_on_to_the_process_that_started_the_router(pair: Any) -> None:
    launcher = grpc.aio.server()
    pb_grpc.add_AdminServiceServicer_to_server(Launcher(), launcher)
    port = launcher.add_insecure_port("127.0.0.1:0")
    await launcher.start()
    await pair.start(launcher_address=f"127.0.0.1:{port}")
    with AdminClient(pair.running.admin_address) as admin:
        scaled = await asyncio.to_thread(admin.scale, {"decode": 2})
        assert scaled.started == ["decode-0", "decode-1"]
        with pytest.raises(Unsupported, match="decode-3 did not start: no memory") as refused:
            await asyncio.to_thread(admin.scale, {"decode": 4})
        assert refused.value.reason == "NOT_SCALED"
        with pytest.raises(DeadlineExceeded, match="it goes on"):
            await asyncio.to_thread(admin.scale, {"decode": 3})
        await launcher.stop(None)
        with pytest.raises(Unavailable, match="`quire serve` did not scale") as gone:
            await asyncio.to_thread(admin.scale, {"decode": 2})
        assert gone.value.reason == "NO_LAUNCHER"


async def test_without_a_launcher_the_remedy_is_named(pair: Any) -> None:
    await pair.start()
    with (
        AdminClient(pair.running.admin_address) as admin,
        pytest.raises(Unsupported, match="start and stop `quire prefill` and `quire decode` yourself"),
    ):
        await asyncio.to_thread(admin.scale, {"decode": 2})
