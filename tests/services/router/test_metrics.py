"""What a router's metrics say of requests that succeed, fail and are late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import FailedPrecondition, Internal, Unavailable
from quire.services.router.config import SloTargets
from quire.services.router.grpc.request_times import RequestTimes
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.metrics.slo import SloMetrics
from quire.services.server.phases import ROUTER_PHASES, Phase

IMPOSSIBLE = SloTargets(ttft_ms=0, tpot_ms=0)
EASY = SloTargets(ttft_ms=60_000, tpot_ms=60_000)


def request(**stopping: Any) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        generation=pb.Generation(text="say", stopping=pb.StoppingParams(**stopping), request_id="test")
    )


async def stream(stub: Any, **stopping: Any) -> list[pb.GenerateStreamResponse]:
    return [response async for response in stub.GenerateStream(request(**stopping), timeout=10)]


def outcomes(cluster: Any) -> dict[tuple[str, str], float]:
    """Return the counted requests by (TTFT, TPOT)."""
    return {
        (ttft, tpot): count
        for ttft in ("met", "missed")
        for tpot in ("met", "missed")
        if (count := cluster.metric("quire_slo_requests_total", ttft=ttft, tpot=tpot))
    }


async def test_a_request_is_observed_once_in_each_histogram(pair: Any) -> None:
    responses = await stream(await pair.start(slo=EASY))
    for phase in ROUTER_PHASES:
        assert pair.metric("quire_request_phase_seconds_count", phase=phase) == 1
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert pair.metric(f"quire_{name}_count") == 1, name
    assert pair.metric("quire_request_generation_tokens_sum") == len(pair.script.answer)
    assert pair.metric("quire_inter_token_latency_seconds_count") == len(responses) - 1
    assert outcomes(pair) == {("met", "met"): 1}


async def test_phases_of_the_router_are_within_ttft(pair: Any) -> None:
    await stream(await pair.start())
    phases = sum(pair.metric("quire_request_phase_seconds_sum", phase=phase) for phase in ROUTER_PHASES)
    assert 0 <= phases <= pair.metric("quire_time_to_first_token_seconds_sum")


async def test_without_a_prefill_worker_there_is_no_wait_for_a_promise(cluster: Any) -> None:
    await cluster.add("d", "decode")
    await stream(await cluster.start())
    assert cluster.metric("quire_request_phase_seconds_count", phase=Phase.ACCEPT) == 0
    assert cluster.metric("quire_request_phase_seconds_count", phase=Phase.CHOOSE) == 1


async def test_late_answers_miss_both_targets(pair: Any) -> None:
    await stream(await pair.start(slo=IMPOSSIBLE))
    assert outcomes(pair) == {("missed", "missed"): 1}
    assert pair.metric("quire_slo_target_seconds", target="ttft") == 0


async def test_a_failure_of_the_client_counts_for_no_target(cluster: Any, fault: Any) -> None:
    worker = await cluster.add("d", "decode")
    stub = await cluster.start(slo=EASY)
    worker.fault = fault(1, FailedPrecondition("x"))
    with pytest.raises(grpc.aio.AioRpcError):
        await stream(stub)
    # The client's own failures, and those that the service could not help, do not count.
    assert outcomes(cluster) == {}
    worker.fault = fault(1, Internal("x"))
    assert [token for each in await stream(stub) for token in each.token_ids] == cluster.script.answer
    assert outcomes(cluster) == {("met", "met"): 1}


@pytest.mark.parametrize("error", [Unavailable("x"), Internal("x")])
async def test_retries_are_counted_by_role_and_cause(pair: Any, fault: Any, error: Any) -> None:
    for name in ("p1", "p2"):
        pair[name].fault = fault(0, error)
    await stream(await pair.start())
    cause = error.code.name.lower()
    assert pair.metric("quire_retries_total", role="prefill", cause=cause) == 2
    assert pair.metric("quire_retries_total", role="decode", cause=cause) == 0
    # Each attempt looks up and chooses again.
    assert pair.metric("quire_request_phase_seconds_count", phase=Phase.LOOKUP) == 3


async def test_a_disconnect_is_no_missed_target(cluster: Any) -> None:
    worker = await cluster.add("d", "decode", pause_before_token=1)
    stub = await cluster.start()
    call = stub.GenerateStream(request(), timeout=10)
    await call.read()
    await asyncio.wait_for(worker.paused.wait(), 5)
    call.cancel()
    await asyncio.wait_for(worker.ended.wait(), 5)
    async with asyncio.timeout(5):
        while not cluster.metric("quire_request_failure_total", grpc_code="CANCELLED"):
            await asyncio.sleep(0.005)
    assert outcomes(cluster) == {}


async def test_refused_requests_miss_both_targets(cluster: Any) -> None:
    worker = await cluster.add("d", "decode", pause_before_token=0)
    stub = await cluster.start(max_requests=1)
    first = asyncio.create_task(stream(stub))
    await asyncio.wait_for(worker.paused.wait(), 5)
    with pytest.raises(grpc.aio.AioRpcError):
        await stream(stub)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert cluster.metric("quire_admission_rejections_total", reason="max_requests") == 1
    assert cluster.metric("quire_request_failure_total", grpc_code="RESOURCE_EXHAUSTED") == 1
    assert outcomes(cluster) == {("missed", "missed"): 1}


@pytest.mark.parametrize(
    ("code", "ttft", "tpot", "expected"),
    [
        ("OK", 1.0, 0.1, ("met", "met")),
        ("OK", 1.1, 0.1, ("missed", "met")),
        ("OK", 1.0, 0.2, ("met", "missed")),
        ("OK", 1.0, None, ("met", "met")),
        ("UNAVAILABLE", None, None, ("missed", "missed")),
        ("DEADLINE_EXCEEDED", 0.5, 0.01, ("met", "missed")),
        ("CANCELLED", 0.5, 0.01, None),
        ("INVALID_ARGUMENT", None, None, None),
    ],
)
def test_judgement(
    code: str, ttft: float | None, tpot: float | None, expected: tuple[str, str] | None
) -> None:
    registry = CollectorRegistry()
    SloMetrics(registry, SloTargets(ttft_ms=1000, tpot_ms=100)).judge(code, ttft, tpot)
    counted = {
        (sample.labels["ttft"], sample.labels["tpot"])
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "quire_slo_requests_total" and sample.value
    }
    assert counted == ({expected} if expected else set())


@pytest.fixture
def timer() -> tuple[RequestTimes, Callable[[str], float], list[float]]:
    """Return a timer, a reading of its metrics, and the time it sees."""
    registry, now = CollectorRegistry(), [0.0]
    metrics = RouterMetrics(registry)
    return RequestTimes(metrics, lambda: now[0]), lambda name: registry.get_sample_value(name) or 0.0, now


def test_tpot_counts_tokens_not_messages(timer: Any) -> None:
    watch, read, now = timer
    with watch.watching():
        for at, num_tokens in ((1.0, 1), (1.5, 4), (2.0, 1)):
            now[0] = at
            watch.sent(pb.GenerateStreamResponse(token_ids=[5] * num_tokens))
    assert read("quire_time_to_first_token_seconds_sum") == 1.0
    assert read("quire_request_time_per_output_token_seconds_sum") == pytest.approx(1.0 / 5)
    assert read("quire_inter_token_latency_seconds_count") == 2


def test_answers_side_by_side_are_timed_apart(timer: Any) -> None:
    watch, read, now = timer
    with watch.watching():
        for at, index in ((1.0, 0), (1.0, 1), (1.5, 0), (3.0, 1)):
            now[0] = at
            watch.sent(pb.GenerateStreamResponse(token_ids=[5], index=index))
    assert read("quire_time_to_first_token_seconds_count") == 1
    assert read("quire_request_time_per_output_token_seconds_count") == 2
    assert read("quire_request_time_per_output_token_seconds_sum") == pytest.approx(0.5 + 2.0)
