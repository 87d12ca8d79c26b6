"""The load of a live run: requests, clients that leave, HTTP, bad requests, pulls, the loss of a worker."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import suppress
from random import Random
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc

from quire.client import AsyncClient, InvalidRequest
from quire.protos import worker_pb2
from quire.protos.worker_pb2_grpc import WorkerServiceStub
from quire.services.local.stack import RunningStack
from tests.testing.decodes import decoding, make_sequence, prefill, pull_source

CALL_SECONDS = 60.0
PULLED_TOKENS = 256
SHARED_PREFIXES = [
    "--shared-prefix-len",
    "192",
    "--input-len",
    "256",
    "--output-len",
    "48",
    "--concurrency",
    "8",
]
LONG_ANSWERS = ["--input-len", "96", "--output-len", "192", "--concurrency", "12"]


async def put_load(stack: RunningStack, seconds: float) -> None:
    """Repeat the load for about ``seconds``; lose a prefill worker in the middle."""
    begin = time.monotonic()
    has_lost = False
    number = 0
    while (passed := time.monotonic() - begin) < seconds:
        num_requests = max(6, int((seconds - passed) / 2))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_bench(stack.address, SHARED_PREFIXES, num_requests, number))
            tasks.create_task(_bench(stack.address, LONG_ANSWERS, num_requests, number))
            tasks.create_task(_leave_early(stack.address))
            tasks.create_task(_ask_for_nothing(stack.address))
            tasks.create_task(_pull(stack, number))
            if stack.http_address is not None:
                tasks.create_task(asyncio.to_thread(_ask_over_http, stack.http_address))
            if passed > seconds / 3 and not has_lost:
                has_lost = True
                stack.workers["prefill-1"].process.kill()
        number += 1


async def _bench(address: str, options: list[str], num_requests: int, seed: int) -> None:
    """Run the command's own benchmark."""
    main = "from quire.cli.main import main; main()"
    command = [sys.executable, "-c", main, "bench", "serve", "--address", address, "--ignore-eos", *options]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--num-requests", str(num_requests), "--num-warmups", "0", "--seed", str(seed)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    await process.wait()


async def _leave_early(address: str) -> None:
    async with AsyncClient(address, timeout=CALL_SECONDS) as client:
        stream = client.stream([5] * 100, max_tokens=100, ignore_eos=True)
        await anext(stream)
        await stream.aclose()


async def _ask_for_nothing(address: str) -> None:
    async with AsyncClient(address, timeout=CALL_SECONDS) as client:
        try:
            await client.generate([5], max_tokens=0)
        except InvalidRequest:
            return


def _ask_over_http(address: str) -> None:
    """Send requests that can be answered, and one for a model that does not exist."""
    for model in ("demo", "nobody"):
        body = {"model": model, "prompt": "hello", "max_tokens": 8}
        headers = {"content-type": "application/json"}
        request = Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
        with suppress(HTTPError), urlopen(request, timeout=CALL_SECONDS) as response:
            response.read()


async def _pull(stack: RunningStack, number: int) -> None:
    """Let a decode worker copy blocks that a prefill worker has computed, as the router sometimes does."""
    prompt = Random(number).choices(range(10, 200), k=PULLED_TOKENS)
    names = ("prefill-0", "decode-0")
    channels = [grpc.aio.insecure_channel(stack.ready[name].address) for name in names]
    owner, taker = map(WorkerServiceStub, map(stack.peer, names, channels))
    try:
        await prefill(owner, make_sequence(prompt, max_tokens=4))
        source = await pull_source(owner, PULLED_TOKENS // 16)
        request = worker_pb2.DecodeRequest(sequence=make_sequence(prompt, max_tokens=4), pull_from=source)
        async with decoding(taker, request) as decode:
            await decode.outputs()
    finally:
        for channel in channels:
            await channel.close(None)
