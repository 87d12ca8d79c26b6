"""The times of one request, and under which outcome it is counted."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.rpc.ended_calls import end_calls
from quire.rpc.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unavailable
from quire.services.router.config import SloTargets
from quire.services.router.grpc.request_times import RequestTimes, outcome_of
from quire.services.router.metrics.metrics import RouterMetrics


class Setup:
    """A timer under a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 10.0
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry, SloTargets(ttft_ms=1000, tpot_ms=100))
        self.timer = RequestTimes(metrics, lambda: self.now)

    def send(self, seconds: float, num_tokens: int, index: int = 0) -> None:
        """Send a message some seconds after the last."""
        self.now += seconds
        self.timer.sent(pb.GenerateStreamResponse(index=index, token_ids=[5] * num_tokens))

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"quire_{name}", labels) or 0.0

    def judged(self) -> list[tuple[str, str]]:
        return [
            (ttft, tpot)
            for ttft in ("met", "missed")
            for tpot in ("met", "missed")
            if self.metric("slo_requests_total", ttft=ttft, tpot=tpot)
        ]


@given(
    messages=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=15
    )
)
def test_each_token_and_each_gap_is_counted_once(messages: list[tuple[int, int, int]]) -> None:
    setup = Setup()
    times: dict[int, list[tuple[float, int]]] = {}
    with setup.timer.watching():
        for seconds, num_tokens, index in messages:
            setup.send(seconds, num_tokens, index)
            if num_tokens:
                times.setdefault(index, []).append((setup.now, num_tokens))
    first = min((answer[0][0] for answer in times.values()), default=None)
    assert setup.metric("time_to_first_token_seconds_count") == (first is not None)
    assert setup.metric("time_to_first_token_seconds_sum") == (first or 10.0) - 10.0
    assert setup.metric("inter_token_latency_seconds_count") == sum(len(each) - 1 for each in times.values())
    spans = [(answer[-1][0] - answer[0][0], sum(num for _, num in answer)) for answer in times.values()]
    assert setup.metric("inter_token_latency_seconds_sum") == sum(seconds for seconds, _ in spans)
    per_token = [seconds / (num_tokens - 1) for seconds, num_tokens in spans if seconds]
    assert setup.metric("request_time_per_output_token_seconds_count") == len(per_token)
    assert setup.metric("request_time_per_output_token_seconds_sum") == pytest.approx(sum(per_token))


def test_the_slowest_answer_decides_whether_the_target_is_met() -> None:
    for slow, expected in ((0.1, "met"), (0.2, "missed")):
        setup = Setup()
        with setup.timer.watching():
            for index in (0, 1):
                setup.send(0.0, 1, index)
            setup.send(0.01, 1, 0)
            setup.send(slow - 0.02, 1, 1)
        assert setup.judged() == [("met", expected)]


def test_a_request_is_a_success_once_its_usage_is_sent() -> None:
    setup = Setup()
    with setup.timer.watching():
        setup.send(0.5, 2)
        assert setup.metric("e2e_request_latency_seconds_count") == 0
        usage = pb.Usage(prompt_tokens=9, completion_tokens=2, cached_prompt_tokens=4)
        setup.now += 0.5
        setup.timer.sent(pb.GenerateStreamResponse(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage))
    assert setup.metric("e2e_request_latency_seconds_sum") == 1.0
    assert setup.metric("request_success_total", finished_reason="length") == 1
    assert setup.metric("request_generation_tokens_sum") == 2
    assert setup.judged() == [("met", "met")]


@pytest.mark.parametrize(
    ("error", "outcome", "is_judged"),
    [
        (DeadlineExceeded("late"), "DEADLINE_EXCEEDED", True),
        (InvalidArgument("n", "is wrong"), "INVALID_ARGUMENT", False),
        (ResourceExhausted("the router is full"), "RESOURCE_EXHAUSTED", True),
        (ResourceExhausted("too many", reason="TENANT_REQUESTS"), "RESOURCE_EXHAUSTED", False),
        (ResourceExhausted("too many", reason="TOKEN_RATE"), "RESOURCE_EXHAUSTED", False),
        (asyncio.CancelledError(), "CANCELLED", False),
        (GeneratorExit(), "CANCELLED", False),
        (RuntimeError("a defect"), "INTERNAL", True),
        (KeyboardInterrupt(), "INTERNAL", True),
    ],
)
async def test_a_failure_is_counted_once_and_passed_on(
    error: BaseException, outcome: str, is_judged: bool
) -> None:
    setup = Setup()
    with pytest.raises(type(error)), setup.timer.watching():
        setup.send(0.1, 1)
        raise error
    assert outcome_of(error) == outcome
    assert outcome in {code.name for code in grpc.StatusCode}
    assert setup.metric("request_failure_total", grpc_code=outcome) == 1
    assert setup.judged() == ([("met", "missed")] if is_judged else [])


async def test_a_call_that_its_server_ends_counts_with_the_status_that_its_client_gets() -> None:
    setup = Setup()

    async def serve() -> None:
        with setup.timer.watching():
            await asyncio.Event().wait()

    call = asyncio.create_task(serve())
    await asyncio.sleep(0)
    await end_calls([call], Unavailable("this server stops"))
    assert setup.metric("request_failure_total", grpc_code="UNAVAILABLE") == 1
