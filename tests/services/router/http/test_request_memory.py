"""Large requests under way have a limit together; small ones pass, and nothing stays counted."""

from __future__ import annotations

import asyncio
import io
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import ResourceExhausted
from quire.services.router.grpc.request_memory import UNCOUNTED_BYTES, RequestMemory
from quire.services.router.metrics.metrics import RouterMetrics
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

LIMIT = 32 << 20
LARGE = 15 << 20
GENERATE = "/quire.v1.GenerationService/Generate"
SMALL = pb.GenerateRequest(generation=pb.Generation(token_ids=pb.TokenIds(ids=[5, 6, 7])))


@given(st.lists(st.lists(st.integers(0, 3 * UNCOUNTED_BYTES), max_size=4), max_size=6))
def test_the_sum_is_that_of_the_requests_that_had_room(requests: list[list[int]]) -> None:
    limit = 4 * UNCOUNTED_BYTES
    memory = RequestMemory(limit, RouterMetrics(CollectorRegistry()))
    with ExitStack() as stack:
        expected = 0
        for parts in requests:
            add = stack.enter_context(memory.request())
            num_read = 0
            for part in parts:
                before, num_read = max(0, num_read - UNCOUNTED_BYTES), num_read + part
                more = max(0, num_read - UNCOUNTED_BYTES) - before
                if expected + more > limit:
                    with pytest.raises(ResourceExhausted):
                        add(part)
                    break
                add(part)
                expected += more
            assert memory.num_bytes == expected <= limit
    assert memory.num_bytes == 0


def padded(request: pb.GenerateRequest, num_bytes: int) -> bytes:
    """Return a request with a field that no server knows, of so many bytes."""
    length = bytes(
        [num_bytes & 127 | 128, num_bytes >> 7 & 127 | 128, num_bytes >> 14 & 127 | 128, num_bytes >> 21]
    )
    return request.SerializeToString() + b"\xfa\x7f" + length + bytes(num_bytes)


async def test_large_requests_wait_for_no_small_one(pair: Any) -> None:
    pair.change("decode", pause_before_token=1)
    stub = await pair.start(max_request_bytes=LIMIT)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(pair.running.address, options=options) as channel:
        generate = channel.unary_unary(GENERATE, None, pb.GenerateResponse.FromString)
        large = [asyncio.ensure_future(generate(padded(SMALL, LARGE))) for _ in range(2)]
        await until(lambda: len(pair["d1"].calls) + len(pair["d2"].calls) == 2)
        await error_of(generate(padded(SMALL, LARGE)), grpc.StatusCode.RESOURCE_EXHAUSTED, str(LIMIT))
        small = asyncio.ensure_future(stub.Generate(SMALL))
        for name in ("d1", "d2"):
            pair[name].goes_on.set()
        answers = await asyncio.gather(*large, small)
        assert {answer.choices[0].text for answer in answers} == {"hello world, stop here"}
        assert (await generate(padded(SMALL, LARGE))).choices[0].text == "hello world, stop here"
    assert pair.metric("quire_admission_rejections_total", reason="max_request_bytes") == 1


async def test_bodies_that_are_still_being_sent_count(start: Any, pair: Any) -> None:
    http: ClientSession = await start(max_request_bytes=LIMIT)
    host, _, port = pair.running.http.address.rpartition(":")
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {LARGE + 1}\r\n\r\n"
    )
    writers = []
    for _ in range(2):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + b" " * LARGE)
        writers.append(writer)
        await writer.drain()
    await until(lambda: pair.metric("quire_router_request_bytes") >= 2 * (LARGE - UNCOUNTED_BYTES))
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8}
    large = b" " * LARGE + b"{}"
    headers = {"Content-Type": "application/json"}
    async with http.post("/v1/completions", data=io.BytesIO(large), headers=headers) as response:
        assert response.status == 429
        assert (await response.json())["error"]["code"] == "overloaded"
    async with http.post("/v1/completions", json=body) as response:
        assert response.status == 200
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    await until(lambda: not pair.metric("quire_router_request_bytes"))
    async with http.post("/v1/completions", data=io.BytesIO(large), headers=headers) as response:
        assert response.status == 400
