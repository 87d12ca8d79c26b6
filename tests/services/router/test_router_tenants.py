"""Keys, tenants, limits and batches through a router with scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.client import AsyncClient, Completion, InvalidRequest, Overloaded, Unauthenticated
from quire.client.errors import from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

METHODS = list(pb.DESCRIPTOR.services_by_name["GenerationService"].methods)
PROMPT = pb.Generation(text="hello")


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """Write and return the keys of a tenant without limits, one of one request, and one of few tokens."""
    tenants = Tenant("acme"), Tenant("single", max_requests=1), Tenant("frugal", tokens_per_minute=30)
    _, keys = write_keys(tmp_path, *tenants)
    return {tenant.name: key for tenant, key in zip(tenants, keys, strict=True)}


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@asynccontextmanager
async def client(cluster: Any, key: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.running.address, api_key=key) as connected:
        yield connected


@pytest.fixture
async def stub(pair: Any, keys: dict[str, str], tmp_path: Path) -> pb_grpc.GenerationServiceStub:
    started: pb_grpc.GenerationServiceStub = await pair.start(api_keys_file=tmp_path / "keys")
    return started


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("metadata", [(), bearer("quire-wrong")])
async def test_no_method_answers_without_a_known_key(
    pair: Any, stub: pb_grpc.GenerationServiceStub, method: Any, metadata: Any
) -> None:
    call = getattr(stub, method.name)(method.input_type._concrete_class(), metadata=metadata)
    caught = await error_of(call.read() if method.server_streaming else call, grpc.StatusCode.UNAUTHENTICATED)
    assert "wrong" not in (caught.details() or "")
    labels = {"grpc_method": method.name, "grpc_code": "UNAUTHENTICATED"}
    await until(lambda: pair.metric("grpc_server_handled_total", **labels) == 1)


async def test_health_needs_no_key(pair: Any, stub: Any) -> None:
    async with grpc.aio.insecure_channel(pair.running.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status in (
        health_pb2.HealthCheckResponse.SERVING,
        health_pb2.HealthCheckResponse.NOT_SERVING,
    )


async def test_the_tenant_and_the_salt_reach_the_workers_apart(pair: Any, stub: Any, keys: Any) -> None:
    async with client(pair, keys["acme"]) as connected:
        await connected.generate("hello", cache_salt="single")
    calls = [call.sequence.cache_scope for call in pair.calls()]
    assert [(scope.tenant, scope.salt) for scope in calls] == [("acme", "single")] * 2


async def test_a_client_cannot_choose_its_tenant(pair: Any, stub: Any, keys: Any) -> None:
    async with client(pair, keys["acme"]) as connected:
        with pytest.raises(Exception, match="cache_salt"):
            await connected.generate("hello", cache_salt="x" * 129)
    metadata = [("tenant", "acme"), ("x-tenant", "acme")]
    asked = stub.Generate(pb.GenerateRequest(generation=PROMPT), metadata=metadata)
    await error_of(asked, grpc.StatusCode.UNAUTHENTICATED)


async def test_more_requests_than_a_tenants_limit(pair: Any, stub: Any, keys: Any) -> None:
    for name in pair.workers:
        pair[name].pause_before_token = 0
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=PROMPT), metadata=bearer(keys["single"]))
    paused = [asyncio.create_task(pair[name].paused.wait()) for name in ("p1", "p2")]
    reading = asyncio.create_task(call.read())
    await asyncio.wait(paused, return_when=asyncio.FIRST_COMPLETED)
    caught = await error_of(
        stub.Generate(pb.GenerateRequest(generation=PROMPT), metadata=bearer(keys["single"]))
    )
    error = from_rpc_error(caught)
    assert isinstance(error, Overloaded)
    assert (error.reason, error.metadata["limit"], error.retry_after) == ("TENANT_REQUESTS", "1", 1)
    assert pair.metric("quire_admission_rejections_total", reason="tenant_requests") == 1
    assert pair.metric("quire_slo_requests_total", ttft="missed", tpot="missed") == 0
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    for task in paused:
        task.cancel()


async def test_more_tokens_than_a_tenants_limit(pair: Any, stub: Any, keys: Any) -> None:
    async with client(pair, keys["frugal"]) as connected:
        first = await connected.generate("hello world")
        assert first.usage.prompt_tokens + first.usage.completion_tokens < 30
        with pytest.raises(Overloaded) as caught:
            for _ in range(30):
                await connected.generate("hello world")
        assert caught.value.reason == "TOKEN_RATE"
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 60
    assert pair.metric("quire_slo_requests_total", ttft="missed", tpot="missed") == 0
    async with client(pair, keys["acme"]) as other:
        assert (await other.generate("hello world")).text == first.text


async def test_the_error_names_the_problem_with_the_key(pair: Any, stub: Any) -> None:
    async with client(pair, "quire-wrong") as connected:
        with pytest.raises(Unauthenticated) as caught:
            await connected.model_info()
    assert caught.value.reason == "UNKNOWN_API_KEY"


async def test_a_batch_answers_each_prompt_and_one_bad_one_spoils_nothing(
    pair: Any, stub: Any, keys: Any
) -> None:
    prompts: list[Any] = ["hello", [], "world", "stop"]
    async with client(pair, keys["single"]) as connected:
        outcomes = dict([each async for each in connected.batch(prompts, max_tokens=3, seed=1)])
        single = await connected.generate("hello", max_tokens=3, seed=1)
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert isinstance(outcomes[0], Completion)
    assert outcomes[0].text == single.text
    assert isinstance(outcomes[1], InvalidRequest)
    assert outcomes[1].reason == "EMPTY_PROMPT"


async def test_a_cancelled_batch_ends_all_of_its_requests(pair: Any, stub: Any, keys: Any) -> None:
    for name in pair.workers:
        pair[name].pause_before_token = 1
    async with client(pair, keys["acme"]) as connected:
        reading = asyncio.create_task(anext(connected.batch(["hello"] * 8)))
        paused = [asyncio.create_task(pair[name].paused.wait()) for name in pair.workers]
        await asyncio.wait(paused, return_when=asyncio.FIRST_COMPLETED)
        assert pair.metric("quire_router_requests_running") == 8
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: not pair.metric("quire_router_requests_running"))
    for task in paused:
        task.cancel()


async def test_many_requests_of_a_tenant_begin_a_few_at_a_time_beside_another(
    pair: Any, stub: Any, keys: Any
) -> None:
    may_compute = asyncio.Event()

    def num_computing(tenant: str) -> int:
        return sum(call.sequence.cache_scope.tenant == tenant for call in pair.calls("prefill"))

    async with client(pair, keys["frugal"]) as small, client(pair, keys["acme"]) as large:
        await small.generate("hello", max_tokens=1)
        for worker in pair.workers.values():
            worker.begins_after = may_compute
        many = [asyncio.ensure_future(large.generate("hello")) for _ in range(20)]
        await until(lambda: num_computing("acme") == len(pair.workers))
        one = asyncio.ensure_future(small.generate("hello", max_tokens=1))
        await until(lambda: num_computing("frugal") == 2)
        assert num_computing("acme") == len(pair.workers)
        may_compute.set()
        await asyncio.gather(one, *many)
