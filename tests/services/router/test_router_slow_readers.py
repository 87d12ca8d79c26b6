"""Clients that stop reading give back their places, and the workers' too."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
import pytest

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc.server import grpc_server
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_ANSWERS = 4, 64
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


def generation(num_answers: int, max_tokens: int) -> pb.Generation:
    return pb.Generation(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(n=num_answers),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


@pytest.mark.parametrize("method", ["GenerateStream", "GenerateBatch"])
async def test_others_are_served_when_clients_stop_reading(
    pair: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(
        "quire.services.router.public_servers.grpc_server", partial(grpc_server, read_seconds=0.3)
    )
    pair.script.answer = [5] * 60
    stub = await pair.start(max_requests=NUM_CLIENTS * NUM_ANSWERS)
    large, small = generation(NUM_ANSWERS, 60), generation(1, 2)
    async with grpc.aio.insecure_channel(pair.running.address, options=NARROW) as narrow:
        hostile = pb_grpc.GenerationServiceStub(narrow)
        if method == "GenerateStream":
            request = pb.GenerateStreamRequest(generation=large)
            calls: list[Any] = [hostile.GenerateStream(request) for _ in range(NUM_CLIENTS)]
        else:
            calls = [hostile.GenerateBatch(pb.GenerateBatchRequest(generations=[large] * 256))]
        labels = {"grpc_method": method, "grpc_code": "CANCELLED"}
        await until(lambda: pair.metric("grpc_server_handled_total", **labels) == len(calls))
        assert pair.metric("quire_router_requests_running") == 0
        answer = await stub.Generate(pb.GenerateRequest(generation=small), timeout=10)
        assert len(answer.choices[0].token_ids) == 2
        for call in calls:
            await error_of(call)
    assert not pair.running.workers.live("decode")[0].num_requests
