"""The choice of the workers of a request's attempts."""

from __future__ import annotations

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


async def test_only_the_first_attempt_counts_what_the_index_had_promised() -> None:
    registry, workers = CollectorRegistry(), {"prefill": [worker("p")], "decode": [worker("d")]}
    for (each,) in workers.values():
        each.health.is_unhealthy = False
        each.load_of_others = SimpleNamespace(pending_tokens=0, resident_tokens=0, num_requests=0)
    cluster: Any = Mock(
        clock=lambda: 0.0,
        metrics=RouterMetrics(registry),
        model=Mock(block_size=BLOCK_SIZE),
        planner=Planner(PolicyConfig(), Blocks(BLOCK_SIZE, 1024), lambda: 0.0, Random(0)),
        prefixes=Mock(look_up=AsyncMock(return_value=PROMPT)),
        queue=Mock(turn=AsyncMock()),
        turns=TenantTurns(lambda: 2, lambda: 0.0),
        workers=Mock(serving=workers.__getitem__),
    )
    choice = WorkerChoice(cluster, CacheScope("", ""), Mock(usage=pb.Usage()), 0.0, lambda: 10.0)
    for attempt in range(3):
        answers: list[Any] = [Mock(token_ids=[])]
        group = AnswerGroup("r", "r-0", [0] * 160, SamplingParams(max_tokens=8), answers, attempt)
        assert (await choice.choose(group, None)).prefill is not None
    assert registry.get_sample_value("quire_prompt_tokens_predicted_total") == 64
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    decisions = [
        sample.value
        for sample in samples
        if sample.name == "quire_router_decision_total" and sample.labels["role"] == "prefill"
    ]
    assert sum(decisions) == 3
