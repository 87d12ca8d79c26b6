"""Embeddings through a router with scripted workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from quire.client import AsyncClient, Client, InvalidRequest, Overloaded
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.errors import Aborted, InvalidArgument
from quire.services.router.tenants.api_keys import Tenant
from quire.services.server.phases import ROUTER_PHASES
from tests.testing.api_keys import write_keys
from tests.testing.fake_worker import embedding_of
from tests.testing.rpc_errors import error_of

INPUTS = [[5, 6, 7, 8], [9, 10], [11] * 20]


def request(*inputs: list[int] | str, **fields: Any) -> pb.EmbedRequest:
    given = [
        pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
        for each in inputs
    ]
    return pb.EmbedRequest(inputs=given, request_id="test", **fields)


async def failure(call: Any) -> tuple[grpc.StatusCode, str]:
    caught = await error_of(call)
    return caught.code(), caught.details() or ""


def vectors(response: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in response.embeddings]


async def test_prefill_workers_alone_answer_in_the_order_of_the_inputs(pair: Any, stub: Any) -> None:
    pair["p1"].num_cached_tokens = pair["p2"].num_cached_tokens = 2
    response = await stub.Embed(request(*INPUTS), timeout=10)
    assert vectors(response) == [pytest.approx(embedding_of(each)) for each in INPUTS]
    assert (response.usage.prompt_tokens, response.usage.cached_prompt_tokens) == (26, 6)
    assert response.request_id == "test"
    assert not pair.calls("decode")
    assert {call.sequence.stopping.max_tokens for call in pair.calls("prefill")} == {1}
    assert not any(call.HasField("ticket") for call in pair.calls("prefill"))
    assert pair.metric("quire_prompt_tokens_total") == 26
    assert pair.metric("quire_prompt_tokens_cached_total") == 6
    assert pair.metric("quire_request_success_total", finished_reason="stop") == 1
    assert pair.metric("quire_e2e_request_latency_seconds_count") == 1
    assert pair.metric("quire_requests_running") == 0
    phases = {phase: pair.metric("quire_request_phase_seconds_count", phase=phase) for phase in ROUTER_PHASES}
    assert phases == dict.fromkeys(ROUTER_PHASES, 0)


async def test_without_prefill_workers_decode_workers_answer(cluster: Any) -> None:
    await cluster.add("d1", "decode")
    stub = await cluster.start()
    assert len((await stub.Embed(request(*INPUTS), timeout=10)).embeddings) == 3
    assert len(cluster["d1"].calls) == 3


async def test_prefill_workers_need_no_decode_worker(cluster: Any) -> None:
    await cluster.add("p1", "prefill")
    stub = await cluster.start()
    assert len((await stub.Embed(request(*INPUTS), timeout=10)).embeddings) == 3


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
async def test_only_the_last_token_lets_the_worker_with_the_prefix_be_chosen(
    cluster: Any, pooling: str
) -> None:
    for name in ("p1", "p2", "p3"):
        embedding = worker_pb2.EmbeddingModel(size=4, pooling=pooling)
        await cluster.add(name, "prefill", embedding=embedding)
    stub = await cluster.start()
    for _ in range(12):
        await stub.Embed(request(INPUTS[2]), timeout=10)
    loads = sorted(len(cluster[name].calls) for name in ("p1", "p2", "p3"))
    assert (loads == [0, 0, 12]) == (pooling == "lasttoken")


async def test_a_failed_worker_is_replaced(pair: Any, stub: Any, fault: Any) -> None:
    pair.change("prefill", fault=fault(0, Aborted("scripted")))
    response = await stub.Embed(request(INPUTS[0]), timeout=10)
    assert vectors(response) == [pytest.approx(embedding_of(INPUTS[0]))]
    assert 1 <= response.usage.retries <= 2


async def test_the_answer_of_a_worker_that_knows_no_embeddings_is_a_failure(cluster: Any) -> None:
    worker = await cluster.add("p1", "prefill")
    stub = await cluster.start()
    worker.embedding = worker_pb2.EmbeddingModel()
    code, _ = await failure(stub.Embed(request(INPUTS[0]), timeout=10))
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_names_the_field(pair: Any, stub: Any, fault: Any) -> None:
    pair.change("prefill", fault=fault(0, InvalidArgument("token_ids", "too long for this worker")))
    code, details = await failure(stub.Embed(request(INPUTS[0]), timeout=10))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "inputs[0]: too long for this worker")


async def test_a_cancelled_request_ends_on_the_workers(pair: Any, stub: Any) -> None:
    pair.change("prefill", pause_before_token=0)
    call = stub.Embed(request(INPUTS[0]), timeout=10)
    waits = [asyncio.create_task(pair[name].paused.wait()) for name in ("p1", "p2")]
    sent = asyncio.ensure_future(call)
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    [worker] = [pair[name] for name in ("p1", "p2") if pair[name].paused.is_set()]
    sent.cancel()
    await asyncio.wait_for(worker.ended.wait(), 5)
    for wait in waits:
        wait.cancel()


async def test_the_deadline_ends_the_request(pair: Any, stub: Any) -> None:
    pair.change("prefill", pause_before_token=0)
    code, _ = await failure(stub.Embed(request(INPUTS[0]), timeout=0.3))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (request(), "inputs: must hold from 1 to 2048; got 0"),
        (request(*[[5]] * 2049), "inputs: must hold from 1 to 2048; got 2049"),
        (pb.EmbedRequest(inputs=[pb.EmbedInput()]), "inputs[0]: must hold at least one token"),
        (request([5], []), "inputs[1]: must hold at least one token"),
        (request([5], [6, 400]), "inputs[1][1]: must be below 320; got 400"),
        (request([5], [6] * 64), "inputs[1]: this model's maximum context length is 64 tokens"),
        (
            request([5], dimensions=2),
            "dimensions: must be absent, or a number of values that the model was trained for; got 2",
        ),
        (request([5], truncate_prompt_tokens=0), "truncate_prompt_tokens: must be at least 1, or -1; got 0"),
        (request([5], cache_salt="x" * 200), "cache_salt: must hold at most 128"),
    ],
)
async def test_invalid_inputs_are_refused(pair: Any, stub: Any, sent: pb.EmbedRequest, message: str) -> None:
    code, details = await failure(stub.Embed(sent, timeout=10))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(message)
    assert not pair.calls("prefill")


async def test_embeddings_too_large_for_a_message_are_refused(cluster: Any) -> None:
    await cluster.add("p1", "prefill", embedding=worker_pb2.EmbeddingModel(size=4096, pooling="mean"))
    stub = await cluster.start()
    code, details = await failure(stub.Embed(request(*[[5]] * 2048), timeout=10))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "inputs: must hold from 1 to 1023; got 2048"


async def test_dimensions_of_a_model_that_was_trained_for_them(cluster: Any) -> None:
    embedding = worker_pb2.EmbeddingModel(size=4, pooling="lasttoken", dimensions=[1, 3])
    await cluster.add("p1", "prefill", embedding=embedding)
    stub = await cluster.start()
    response = await stub.Embed(request(INPUTS[0], dimensions=3), timeout=10)
    assert len(response.embeddings[0].values) == 3
    for wrong in (0, 2, 5):
        code, _ = await failure(stub.Embed(request(INPUTS[0], dimensions=wrong), timeout=10))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_long_inputs_are_cut(pair: Any, stub: Any) -> None:
    await stub.Embed(request([5] * 100, "hello " * 40, truncate_prompt_tokens=-1), timeout=10)
    await stub.Embed(request([5, 6, 7], "hello", truncate_prompt_tokens=2), timeout=10)
    lengths = [len(call.sequence.token_ids) for call in pair.calls("prefill")]
    assert sorted(lengths) == [2, 2, 63, 63]
    assert [5, 6] in [list(call.sequence.token_ids) for call in pair.calls("prefill")]


async def test_tokens_are_charged_at_once_and_places_are_counted(pair: Any, tmp_path: Path) -> None:
    tenants = Tenant("single", max_requests=1), Tenant("frugal", tokens_per_minute=30)
    file, [single, frugal] = write_keys(tmp_path, *tenants)
    await pair.start(api_keys_file=file)
    async with AsyncClient(pair.running.address, api_key=frugal) as client:
        assert (await client.embed(INPUTS)).usage.prompt_tokens == 26
        with pytest.raises(Overloaded, match="30 tokens a minute"):
            await client.embed(INPUTS)
    async with AsyncClient(pair.running.address, api_key=single) as client:
        assert len((await client.embed(INPUTS)).vectors) == 3
    tenants_of_calls = Counter(call.sequence.cache_scope.tenant for call in pair.calls("prefill"))
    assert tenants_of_calls == {"frugal": 3, "single": 3}


async def test_both_clients(pair: Any) -> None:
    await pair.start()

    def embed() -> Any:
        with Client(pair.running.address) as client:
            with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
                client.embed(["hello"], truncate_prompt_tokens=0)
            return client.embed([*INPUTS, "hello"], request_id="mine", cache_salt="s")

    found = await asyncio.to_thread(embed)
    assert found.request_id == "mine"
    assert found.vectors[0] == pytest.approx(embedding_of(INPUTS[0]))
    assert {call.sequence.cache_scope.salt for call in pair.calls("prefill")} == {"s"}
    async with AsyncClient(pair.running.address) as client:
        assert (await client.embed([*INPUTS, "hello"])).vectors == found.vectors
