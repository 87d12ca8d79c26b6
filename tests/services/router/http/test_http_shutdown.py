"""The end of a router that has HTTP requests."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from aiohttp import ClientSession

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.protos import worker_pb2
from quire.services.router.app import run_router
from quire.services.router.config import RouterConfig


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_a_signal_lets_requests_end_within_the_grace(cluster: Any, ends_in_time: bool) -> None:
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def decode(request: Any, context: Any) -> AsyncIterator[worker_pb2.DecodeResponse]:
        yield worker_pb2.DecodeResponse(accepted=worker_pb2.Accepted())
        has_begun.set()
        await may_end.wait()
        token = cluster.script.token(0)
        last = worker_pb2.SequenceOutput(tokens=[token], finish_reason=pb.FINISH_REASON_LENGTH)
        await worker.send(request, last)

    worker = await cluster.add("d", "decode", Decode=decode)
    reported: asyncio.Queue[Any] = asyncio.Queue()
    config = RouterConfig(
        port=0,
        metrics_port=0,
        http_port=0,
        worker_addresses=(worker.server.address,),
        grace_seconds=30 if ends_in_time else 1.0,
    )
    running = asyncio.create_task(run_router(config, reported.put_nowait, reported.put_nowait))
    router = await asyncio.wait_for(reported.get(), 5)
    async with asyncio.timeout(10), ClientSession(f"http://{router.http.address}") as http:
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "say", "max_tokens": 1}))
        await has_begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        told = await reported.get()
        assert (told.num_requests, told.seconds_left > 0) == (1, True)
        async with http.post("/v1/completions", json={"prompt": "say"}) as refused:
            error = (await refused.json())["error"]
            assert (refused.status, error["code"]) == (503, "draining")
            assert "this router is stopping" in error["message"]
        async with http.get("/ready") as ready:
            assert ready.status == 503
        async with grpc.aio.insecure_channel(router.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="this router is stopping"):
                await pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest())
        if ends_in_time:
            may_end.set()
            assert (await (await asking).json())["choices"][0]["text"] == "hello"
        else:
            ended = await asking
            assert (ended.status, (await ended.json())["error"]["code"]) == (503, "draining")
        await running
    may_end.set()
