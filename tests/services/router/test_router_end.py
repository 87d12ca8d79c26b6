"""The end of a real router process at the end of its grace period: every client gets UNAVAILABLE."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from aiohttp import ClientSession

from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.protos import worker_pb2
from quire.services.server.process import free_port
from tests.testing.processes import QUIRE

SECONDS = 60.0


@pytest.mark.slow
async def test_running_calls_get_unavailable_at_the_end_of_the_grace_period(cluster: Any) -> None:
    num_begun, all_begun = 0, asyncio.Event()

    async def decode(request: Any, context: Any) -> AsyncIterator[worker_pb2.DecodeResponse]:
        nonlocal num_begun
        yield worker_pb2.DecodeResponse(accepted=worker_pb2.Accepted())
        output = worker_pb2.SequenceOutput(tokens=[cluster.script.token(0)])
        await worker.send(request, output)
        num_begun += 1
        if num_begun == 4:
            all_begun.set()
        await asyncio.Event().wait()

    worker = await cluster.add("d", "decode", Decode=decode)
    grpc_port, http_port = free_port(), free_port()
    ports = {"--port": grpc_port, "--http-port": http_port, "--metrics-port": 0, "--admin-port": 0}
    options = [str(each) for pair in ports.items() for each in pair]
    process = await asyncio.create_subprocess_exec(
        *QUIRE,
        *("router", "--worker", worker.server.address, "--grace-period", "1", *options),
        env={**os.environ, "QUIRE_CLUSTER_SECRET": ""},
    )
    body = {"prompt": "say", "max_tokens": 8}
    generation = pb.Generation(text="say")
    try:
        async with (
            asyncio.timeout(SECONDS),
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
            ClientSession(f"http://127.0.0.1:{http_port}") as http,
        ):
            await channel.channel_ready()
            stub = pb_grpc.GenerationServiceStub(channel)
            whole = asyncio.ensure_future(stub.Generate(pb.GenerateRequest(generation=generation)))
            stream = stub.GenerateStream(pb.GenerateStreamRequest(generation=generation))
            assert (await stream.read()).token_ids
            asking = asyncio.create_task(http.post("/v1/completions", json=body))
            events = await http.post("/v1/completions", json=body | {"stream": True})
            await all_begun.wait()
            process.terminate()
            for call in (whole, stream.read()):
                try:
                    await call
                    raise AssertionError("the call has ended without an error")
                except grpc.aio.AioRpcError as error:
                    ended = from_rpc_error(error)
                assert (ended.code, ended.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert "its time to drain is over" in str(ended)
            answer = await asking
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "draining")
            assert answer.headers["Retry-After"] == "1"
            last = [line async for line in events.content if line.startswith(b"data: ")][-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "draining"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
