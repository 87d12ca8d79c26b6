"""What one request is said to have used, over all its attempts."""

from __future__ import annotations

import logging
from random import Random
from typing import cast
from unittest.mock import Mock

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.routing.placement import Placement, PlannedPrompt, Planner, PolicyConfig, PullOutcome
from quire.routing.policy import CandidateWorker
from quire.routing.pulls import Blocks
from quire.sampling.params import SamplingParams
from quire.services.router.execution.failures import WorkerCallFailed
from quire.services.router.execution.request_account import RequestAccount
from quire.services.router.execution.token_charge import RequestCharge
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.outputs.answer_group import AnswerGroup
from quire.services.router.workers.worker import Worker, WorkerConnection
from tests.testing.rpc_errors import rpc_error

BLOCK_SIZE = 16
NUM_TOKENS = 160
HASHES = [bytes([index]) * 16 for index in range(NUM_TOKENS // BLOCK_SIZE)]
WORKER = Worker(
    "d:1", worker_pb2.GetWorkerInfoResponse(worker_id="d", role="decode"), cast(WorkerConnection, None)
)


class Setup:
    """The account of one request, and the metrics that it counts in."""

    def __init__(self) -> None:
        self.now = 100.0
        self.charged: list[int] = []
        self.registry = CollectorRegistry()
        clock = self.clock
        self.planner = Planner(
            PolicyConfig(local_prefill_tokens=0), Blocks(BLOCK_SIZE, 1024), clock, Random(0)
        )
        metrics = RouterMetrics(self.registry)
        self.account = RequestAccount(
            metrics, Mock(), self.planner, clock, NUM_TOKENS, RequestCharge(self.charged.append, 64)
        )

    def clock(self) -> float:
        return self.now

    def place(self) -> Placement:
        """Place the prompt; the index says that P has 64 of its tokens."""
        prompt = PlannedPrompt(NUM_TOKENS, HASHES, {"p": 64})
        p, d = (CandidateWorker(name, capacity_tokens=16_000) for name in "pd")
        placement = self.planner.place(prompt, [p], [d])
        assert placement is not None
        return placement


@pytest.fixture
def setup() -> Setup:
    return Setup()


def group(attempt: int = 0, answer: int = 0) -> AnswerGroup:
    return AnswerGroup("r", f"r-{answer}", [], SamplingParams(), [], attempt)


def failure(code: grpc.StatusCode) -> WorkerCallFailed:
    return WorkerCallFailed(WORKER, rpc_error(code))


def prefilled(num_cached_tokens: int, num_blocks: int = 0, num_bytes: int = 0) -> worker_pb2.PrefillResponse:
    pulled = worker_pb2.PullSummary(num_blocks=num_blocks, num_bytes=num_bytes)
    return worker_pb2.PrefillResponse(num_cached_tokens=num_cached_tokens, pulled=pulled)


def pushed(num_blocks: int, num_bytes: int) -> worker_pb2.PrefillResponse:
    return worker_pb2.PrefillResponse(
        pushed=worker_pb2.PushSummary(num_blocks=num_blocks, num_bytes=num_bytes)
    )


def test_cached_tokens_are_those_of_the_first_attempt(setup: Setup) -> None:
    setup.account.record_prefill(prefilled(32))
    # The next attempt finds what the first one computed.
    setup.account.record_prefill(prefilled(144))
    assert setup.account.usage.cached_prompt_tokens == 32


def test_no_more_is_cached_than_the_prompt_has(setup: Setup) -> None:
    setup.account.record_prefill(prefilled(NUM_TOKENS + 5))
    assert setup.account.usage.cached_prompt_tokens == NUM_TOKENS


def test_moved_blocks_add_up_over_the_attempts(setup: Setup) -> None:
    for num_blocks, num_bytes in ((3, 300), (2, 200)):
        setup.account.record_prefill(prefilled(0, num_blocks, num_bytes))
        setup.account.record_prefill(pushed(num_blocks, num_bytes))
    usage = setup.account.usage
    assert (usage.blocks_pulled, usage.bytes_pulled) == (5, 500)
    assert (usage.blocks_shipped, usage.bytes_shipped) == (5, 500)


def test_a_push_does_not_change_the_logprobs_of_the_prompt(setup: Setup) -> None:
    logprobs = [pb.TokenLogprobs(logprob=-1.0)]
    setup.account.record_prefill(worker_pb2.PrefillResponse(prompt_logprobs=logprobs))
    setup.account.record_prefill(pushed(1, 100))
    assert list(setup.account.prompt_logprobs) == logprobs


@pytest.mark.parametrize(("num_pulled", "num_reused"), [(0, 4), (3, 1), (5, 0)])
def test_blocks_that_were_pulled_were_not_there_before(
    setup: Setup, num_pulled: int, num_reused: int
) -> None:
    accepted = worker_pb2.Accepted(
        num_cached_tokens=4 * BLOCK_SIZE + 3, pulled=worker_pb2.PullSummary(num_blocks=num_pulled)
    )
    message = worker_pb2.DecodeResponse(accepted=accepted)
    setup.account.record_local_prefill(group(), setup.place(), message, BLOCK_SIZE, setup.now)
    assert setup.account.usage.blocks_reused_on_decode == num_reused


@pytest.mark.parametrize(("failure", "has_failed"), [("", False), ("timeout", True), ("no_blocks", False)])
def test_a_worker_without_free_blocks_does_not_count_as_a_failed_peer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, failure: str, has_failed: bool
) -> None:
    outcomes: list[PullOutcome] = []
    monkeypatch.setattr(
        setup.account._planner, "record_prefill", lambda *arguments: outcomes.append(arguments[-1])
    )
    message = prefilled(0)
    message.pulled.failure = failure
    setup.account.record_computed(group(), setup.place(), message, start=setup.now)
    assert [each.has_failed for each in outcomes] == [has_failed]


def test_expected_and_measured_times_are_of_the_same_request(setup: Setup) -> None:
    placement = setup.place()
    setup.now += 2.0
    setup.account.record_computed(group(), placement, prefilled(48), start=setup.now - 0.5)
    values = {
        sample.labels["kind"]: sample.value
        for metric in setup.registry.collect()
        for sample in metric.samples
        if sample.name == "quire_router_expected_seconds_total"
    }
    assert values == {"expected": pytest.approx(placement.estimate.seconds), "taken": 2.0}


def test_only_the_first_attempt_is_charged_computed_tokens(setup: Setup) -> None:
    for attempt in range(2):
        setup.account.record_computed(group(attempt), setup.place(), prefilled(48), setup.now)
    assert setup.charged == [NUM_TOKENS - 48 - 64], "64 tokens were charged before"


def test_answers_that_were_lost_together_are_one_retry(setup: Setup) -> None:
    for answer in range(3):
        setup.account.record_failure(group(0, answer), failure(grpc.StatusCode.ABORTED), is_last=False)
    assert setup.account.usage.retries == 1
    setup.account.record_failure(group(1), failure(grpc.StatusCode.ABORTED), is_last=False)
    setup.account.record_failure(group(2), failure(grpc.StatusCode.ABORTED), is_last=True)
    assert setup.account.usage.retries == 2, "the last failure leads to no attempt"


@pytest.mark.parametrize(
    ("code", "level"),
    [(grpc.StatusCode.UNAVAILABLE, logging.WARNING), (grpc.StatusCode.INVALID_ARGUMENT, logging.DEBUG)],
)
def test_the_log_warns_of_errors_that_are_not_the_clients(
    setup: Setup, code: grpc.StatusCode, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "quire.router")
    setup.account.record_failure(group(), failure(code), is_last=True)
    assert [(each.message, each.levelno) for each in caplog.records] == [("attempt_failed", level)]
