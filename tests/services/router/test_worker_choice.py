"""The choice of the workers of a request's attempts."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

from prometheus_client import CollectorRegistry

from quire.kvindex.block_hash import CacheScope
from quire.protos import inference_pb2 as pb
from quire.routing.placement import PlannedPrompt, Planner, PolicyConfig
from quire.routing.pulls import Blocks
from quire.sampling.params import SamplingParams
from quire.services.router.execution.worker_choice import WorkerChoice
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.workers.tenant_turns import TenantTurns
from quire.services.server.phases import Phase
from tests.testing.until import until

BLOCK_SIZE = 16
PROMPT = PlannedPrompt(160, [bytes([index]) * 16 for index in range(10)], {"p": 64})


def worker(name: str) -> Any:
    return Mock(
        worker_id=name,
        pending_before=lambda tenant, num_tokens: 0,
        resident_tokens=0,
        num_requests=0,
        info=Mock(num_blocks=1000),
        revision="a",
    )


def cluster_of(registry: CollectorRegistry, turns: TenantTurns) -> Any:
    """Return a cluster with one worker of each role."""
    workers = {"prefill": [worker("p")], "decode": [worker("d")]}
    for (each,) in workers.values():
        each.health.is_unhealthy = False
        each.load_of_others = SimpleNamespace(pending_tokens=0, resident_tokens=0, num_requests=0)
    return Mock(
        clock=lambda: 0.0,
        metrics=RouterMetrics(registry),
        model=Mock(block_size=BLOCK_SIZE),
        planner=Planner(PolicyConfig(), Blocks(BLOCK_SIZE, 1024), lambda: 0.0, Random(0)),
        prefixes=Mock(look_up=AsyncMock(return_value=PROMPT)),
        queue=Mock(turn=AsyncMock()),
        turns=turns,
        workers=Mock(serving=workers.__getitem__),
    )


def group_of(name: str, attempt: int = 0) -> AnswerGroup:
    answers: list[Any] = [Mock(token_ids=[])]
    return AnswerGroup("r", name, [0] * 160, SamplingParams(max_tokens=8), answers, attempt)


async def test_only_the_first_attempt_counts_what_the_index_had_promised() -> None:
    registry = CollectorRegistry()
    cluster = cluster_of(registry, TenantTurns(lambda: 2, lambda: 0.0))
    choice = WorkerChoice(cluster, CacheScope("", ""), Mock(usage=pb.Usage()), 0.0, lambda: 10.0)
    for attempt in range(3):
        assert (await choice.choose(group_of("r-0", attempt), None)).prefill is not None
    assert registry.get_sample_value("quire_prompt_tokens_predicted_total") == 64
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    decisions = [
        sample.value
        for sample in samples
        if sample.name == "quire_router_decision_total" and sample.labels["role"] == "prefill"
    ]
    assert sum(decisions) == 3


async def test_answers_that_continue_separately_share_the_turn_of_their_request() -> None:
    turns = TenantTurns(lambda: 2, lambda: 0.0)
    others = [await turns.begin(tenant, 1, 160, 0.0, 10.0) for tenant in ("small", "large", "large")]
    cluster, scope = cluster_of(CollectorRegistry(), turns), CacheScope("large", "")
    choice = WorkerChoice(cluster, scope, Mock(usage=pb.Usage()), 0.0, lambda: 10.0)
    choosing = [asyncio.ensure_future(choice.choose(group_of(name), None)) for name in ("r-0", "r-1")]
    await until(lambda: turns.num_waiting_tokens("large") > 0)
    for turn in others:
        turn.end()
    await asyncio.gather(*choosing)
    await choice.aclose()
    for _ in range(2):
        await turns.begin("large", 1, 160, 0.0, 0.0)


async def test_the_wait_for_a_turn_is_a_phase_of_a_request_and_not_of_an_attempt() -> None:
    turns = TenantTurns(lambda: 2, lambda: 0.0)
    others = [await turns.begin(tenant, 1, 160, 0.0, 10.0) for tenant in ("small", "large", "large")]
    cluster, scope = cluster_of(CollectorRegistry(), turns), CacheScope("large", "")
    now, account = 5.0, Mock(usage=pb.Usage())
    cluster.clock = lambda: now
    choice = WorkerChoice(cluster, scope, account, 0.0, lambda: 10.0)
    choosing = asyncio.ensure_future(choice.choose(group_of("r-0"), None))
    await until(lambda: turns.num_waiting_tokens("large") > 0)
    now = 8.0
    for turn in others:
        turn.end()
    await choosing
    await choice.choose(group_of("r-0", attempt=1), None)
    phases = [call.args for call in account.phases.record.call_args_list]
    assert [phase for phase, _, _ in phases] == [Phase.TURN, *(Phase.LOOKUP, Phase.CHOOSE) * 2]
    assert phases[0] == (Phase.TURN, 5.0, 8.0)
