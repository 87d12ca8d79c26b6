"""The steps of a prompt: what is pulled for it, how it is accounted, and its logprobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from prometheus_client import CollectorRegistry

from quire.engine.errors import RequestTooLongError
from quire.engine.sequences.sequence import Sequence, TokenLogprobs
from quire.kvindex.kv_layout import KvShape
from quire.protos import worker_pb2
from quire.rpc.errors import InvalidArgument
from quire.sampling.params import SamplingParams
from quire.services.server.phases import RequestPhases
from quire.services.server.tracing import NO_SPAN
from quire.services.worker.parts import WorkerParts
from quire.services.worker.prompt_steps import account_prompt, add_sequence, prompt_logprobs, pull_prefix
from quire.services.worker.reports.metrics import PromptMetrics

BLOCK_SIZE = 4
MakeParts = Callable[..., WorkerParts]


def sequence() -> Sequence:
    return Sequence("r#0", list(range(40)), 40, SamplingParams(), b"")


class Setup:
    """The parts of a worker that a prompt needs, and its metrics."""

    def __init__(self, make_parts: MakeParts) -> None:
        self.registry = CollectorRegistry()
        self.prompts = PromptMetrics(self.registry)
        self.puller = AsyncMock()
        self.engine = AsyncMock()
        shape = KvShape(1, 1, BLOCK_SIZE, 8, "float16")
        given: dict[str, Any] = {"prompts": self.prompts, "puller": self.puller, "engine": self.engine}
        self.parts = make_parts(memory=Mock(shape=shape), **given)
        self.phases = RequestPhases(self.prompts.phases, NO_SPAN)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"quire_{name}", labels)


@pytest.fixture
def setup(make_parts: MakeParts) -> Setup:
    return Setup(make_parts)


@pytest.mark.parametrize("kind", [worker_pb2.PrefillRequest, worker_pb2.DecodeRequest])
async def test_without_a_peer_nothing_is_pulled_or_measured(setup: Setup, kind: Any) -> None:
    assert await pull_prefix(setup.parts, kind(), sequence(), setup.phases) == worker_pb2.PullSummary()
    setup.puller.pull.assert_not_awaited()
    assert setup.metric("request_phase_seconds_count", phase="pull") == 0


async def test_a_pull_is_measured_and_returns_its_blocks(setup: Setup) -> None:
    came, source = worker_pb2.PullSummary(num_blocks=3), worker_pb2.PullSource(address="p:1", num_blocks=5)
    setup.puller.pull.return_value = came
    prompt = sequence()
    request = worker_pb2.PrefillRequest(pull_from=source)
    assert await pull_prefix(setup.parts, request, prompt, setup.phases) == came
    setup.puller.pull.assert_awaited_once_with(prompt, source)
    assert setup.metric("request_phase_seconds_count", phase="pull") == 1


async def test_a_prompt_that_the_engine_refuses_has_a_status(setup: Setup) -> None:
    setup.engine.call.side_effect = RequestTooLongError("too long")
    with pytest.raises(InvalidArgument, match="token_ids: too long"):
        await add_sequence(setup.parts, sequence())


def test_a_prompts_time_is_split_where_its_first_step_began(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.services.worker.prompt_steps.perf_counter", lambda: 17.5)
    prompt = sequence()
    prompt.queued_at, prompt.started_at = 10.0, 12.0
    prompt.num_cached_tokens = 24
    account_prompt(setup.parts, prompt, worker_pb2.PullSummary(num_blocks=5), setup.phases)
    assert setup.metric("request_phase_seconds_sum", phase="prefill_queue") == 2.0
    assert setup.metric("request_phase_seconds_sum", phase="prefill_compute") == 5.5
    hits = {each: setup.metric("prefix_cache_hits_total", source=each) for each in ("own", "tier", "peer")}
    assert hits == {"own": 24 - 5 * BLOCK_SIZE, "tier": 0, "peer": 5 * BLOCK_SIZE}


async def test_logprobs_keep_the_order_of_the_prompt() -> None:
    prompt = sequence()
    assert await prompt_logprobs(prompt) == []
    prompt.prompt_logprobs = [TokenLogprobs(-float(at), [(at, -0.5)]) for at in range(30)]
    found = await prompt_logprobs(prompt)
    assert [each.logprob for each in found] == [-float(at) for at in range(30)]
    assert [each.top[0].token_id for each in found] == list(range(30))
