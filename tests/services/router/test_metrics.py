"""What a router's metrics say of requests that succeed, fail and are late."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.services.router.config import SloTargets
from quire.services.server.phases import ROUTER_PHASES, Phase
from tests.testing.fake_worker import stream
from tests.testing.rpc_errors import error_of

IMPOSSIBLE = SloTargets(ttft_ms=1e-9, tpot_ms=1e-9)
EASY = SloTargets(ttft_ms=60_000, tpot_ms=60_000)


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
    assert pair.metric("quire_slo_target_seconds", target="ttft") == IMPOSSIBLE.ttft_seconds


async def test_refused_requests_miss_both_targets(cluster: Any) -> None:
    worker = await cluster.add("d", "decode", pause_before_token=0)
    stub = await cluster.start(max_requests=1)
    first = asyncio.create_task(stream(stub))
    await asyncio.wait_for(worker.paused.wait(), 5)
    await error_of(stream(stub))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert cluster.metric("quire_admission_rejections_total", reason="max_requests") == 1
    assert cluster.metric("quire_request_failure_total", grpc_code="RESOURCE_EXHAUSTED") == 1
    assert outcomes(cluster) == {("missed", "missed"): 1}
