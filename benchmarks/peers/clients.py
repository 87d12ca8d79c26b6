"""Sends requests to a server over HTTP or gRPC, and records when tokens arrive.

The client shares the processors with the server. Over HTTP it therefore does not decode the messages of a
stream: it records the time of each message, and reads the token counts from the last one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import aiohttp

from quire.benchmarks.peers.workloads import Requests
from quire.cli.bench.load import send
from quire.cli.bench.summary import OK, RequestRecord, Summary, summarize
from quire.cli.bench.workload import BenchRequest
from quire.client import AsyncClient

MODEL = "model"
"""The name under which every server serves its model."""
CHECK_PROMPT, CHECK_TOKENS = [2, 3, 4], 2
"""A small request, which shows that a server answers."""
ANSWER_SECONDS = 600
"""Time limit of an answer."""
TAIL_BYTES = 4096
"""Bytes of a stream's end that are kept, enough for the message with the token counts."""

Send: TypeAlias = Callable[[Sequence[int], int, float], Awaitable[RequestRecord]]
"""Sends a prompt and a number of tokens, due at a time of ``time.perf_counter``; returns the record."""


@asynccontextmanager
async def http_sender(url: str) -> AsyncIterator[Send]:
    """Yield the function that sends a request to ``/v1/completions`` of a server."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def send_over_http(prompt: Sequence[int], max_tokens: int, due: float) -> RequestRecord:
            body = json.dumps(completion_body(prompt, max_tokens))
            headers = {"content-type": "application/json"}
            arrivals: list[float] = []
            tail = b""
            try:
                async with session.post(f"{url}/v1/completions", data=body, headers=headers) as response:
                    async for chunk in response.content.iter_any():
                        if b'"text"' in chunk:
                            arrivals.append(time.perf_counter())
                        tail = (tail + chunk)[-TAIL_BYTES:]
            except (aiohttp.ClientError, TimeoutError) as error:
                return RequestRecord(type(error).__name__, due, time.perf_counter())
            return http_record(response.status, tail, arrivals, due)

        yield send_over_http


@asynccontextmanager
async def grpc_sender(address: str) -> AsyncIterator[Send]:
    """Yield the function that sends a request to quire's gRPC service."""
    async with AsyncClient(address, timeout=ANSWER_SECONDS) as client:

        async def send_over_grpc(prompt: Sequence[int], max_tokens: int, due: float) -> RequestRecord:
            request = BenchRequest(
                list(prompt), {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
            )
            return await send(client, request, due)

        yield send_over_grpc


def completion_body(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    """Return the body of a streamed greedy request."""
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def http_record(status: int, tail: bytes, arrivals: Sequence[float], due: float) -> RequestRecord:
    """Return the record of a response that has just ended, from its status and the end of its body."""
    end = time.perf_counter()
    usage = usage_of(tail)
    if status != 200 or usage is None or not arrivals:
        return RequestRecord(f"HTTP {status}: {tail[-200:].decode(errors='replace')}", due, end)
    return RequestRecord(
        OK,
        due,
        end,
        tuple(arrivals),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
    )


def usage_of(tail: bytes) -> dict[str, int] | None:
    """Return the token counts in the end of a stream, or None if it ended without them."""
    for line in reversed(tail.splitlines()):
        if line.startswith(b"data: {"):
            usage: dict[str, int] | None = json.loads(line.removeprefix(b"data: ")).get("usage")
            return usage
    return None


async def run_batches(send: Send, batches: Sequence[Requests]) -> Summary:
    """Send all requests of a batch at once, and the next batch when every answer is complete."""
    records: list[RequestRecord] = []
    begin = time.perf_counter()
    for requests in batches:
        due = time.perf_counter()
        each = zip(requests.prompts, requests.max_tokens, strict=True)
        records += await asyncio.gather(*(send(prompt, most, due) for prompt, most in each))
    return summarize(records, time.perf_counter() - begin)
