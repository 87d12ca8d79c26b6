"""Who may begin: limits, turns, and places that are never lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted
from quire.services.requests.validation import Answers, answers_of
from quire.services.router.metrics.metrics import RouterMetrics, TenantCounts
from quire.services.router.tenants.admission import Admission
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.until import until

SOON = 60.0


def make_admission(max_requests: int = 100, clock: Callable[[], float] = time.monotonic) -> Admission:
    return Admission(max_requests, RouterMetrics(CollectorRegistry()), clock)


async def test_each_tenants_requests_and_tokens_are_counted() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    admission, deadline = Admission(100, metrics, time.monotonic), time.monotonic() + SOON
    tenant = Tenant("a", max_requests=1, max_waiting=1, tokens_per_minute=10)
    async with admission.admitted(tenant, deadline) as allowance, admission.admitted(Tenant(), deadline):
        second = asyncio.create_task(admission.admitted(tenant, deadline).__aenter__())
        await until(lambda: metrics.tenants["a"].num_waiting)
        await allowance.spend_prompt(7)
        with pytest.raises(ResourceExhausted):
            await allowance.spend_prompt(4)  # refused, so not counted
        allowance.spend(2)
        assert metrics.tenants == {"a": TenantCounts(2, 1, 9), "": TenantCounts(1, 0, 0)}
        second.cancel()
        await asyncio.wait([second])
    assert metrics.tenants == {"a": TenantCounts(0, 0, 9), "": TenantCounts(0, 0, 0)}


async def test_all_tenants_together_have_a_limit() -> None:
    admission = make_admission(max_requests=2)
    deadline = time.monotonic() + SOON
    async with AsyncExitStack() as stack:
        for name in ("a", "b"):
            await stack.enter_async_context(admission.admitted(Tenant(name), deadline))
        with pytest.raises(ResourceExhausted) as caught:
            await stack.enter_async_context(admission.admitted(Tenant("c"), deadline))
        assert (caught.value.reason, caught.value.retry_after_seconds) == ("OVERLOADED", 1.0)
    async with admission.admitted(Tenant("c"), deadline):
        pass


async def test_a_tenants_requests_wait_their_turn_and_others_do_not() -> None:
    admission, tenant = make_admission(), Tenant("a", max_requests=1, max_waiting=2)
    deadline = time.monotonic() + SOON
    order: list[int] = []
    done = asyncio.Event()

    async def request(number: int) -> None:
        async with admission.admitted(tenant, deadline):
            order.append(number)
            await done.wait()

    tasks = []
    for number in range(3):
        tasks.append(asyncio.create_task(request(number)))
        await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted) as caught:
        await request(3)
    assert (caught.value.reason, caught.value.metadata) == ("TENANT_REQUESTS", {"limit": "1"})
    async with admission.admitted(Tenant("b", max_requests=1), deadline):
        assert order == [0]
    done.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_a_request_that_times_out_or_is_cancelled_takes_no_place() -> None:
    admission, tenant = make_admission(), Tenant("a", max_requests=1, max_waiting=2)
    deadline = time.monotonic() + SOON
    async with admission.admitted(tenant, deadline):
        with pytest.raises(DeadlineExceeded):
            async with admission.admitted(tenant, time.monotonic() + 0.01):
                pytest.fail("was admitted")
        gone = asyncio.create_task(admission.admitted(tenant, deadline).__aenter__())
        await asyncio.sleep(0)
        gone.cancel()
    # The place came free in the very moment in which the waiting one was cancelled.
    async with admission.admitted(tenant, deadline):
        with pytest.raises(asyncio.CancelledError):
            await gone
    async with admission.admitted(tenant, deadline):
        pass


async def test_a_place_granted_during_the_cancellation_goes_to_the_next_request() -> None:
    admission, tenant = make_admission(), Tenant("a", max_requests=1, max_waiting=2)
    deadline = time.monotonic() + SOON
    first = admission.admitted(tenant, deadline)
    await first.__aenter__()
    second = asyncio.create_task(admission.admitted(tenant, deadline).__aenter__())
    third = asyncio.create_task(admission.admitted(tenant, deadline).__aenter__())
    await asyncio.sleep(0)
    await first.__aexit__(None, None, None)
    second.cancel()
    await asyncio.wait_for(third, SOON)
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_tokens_are_charged_before_the_prompt_and_during_the_answer() -> None:
    now = 0.0
    admission, tenant = make_admission(clock=lambda: now), Tenant("a", tokens_per_minute=600)
    async with admission.admitted(tenant, SOON) as allowance:
        await allowance.spend_prompt(500)
        allowance.spend(150)
    with pytest.raises(ResourceExhausted) as caught:
        async with admission.admitted(tenant, SOON):
            pytest.fail("was admitted in debt")
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("TOKEN_RATE", 5.0)
    now = 5.0
    async with admission.admitted(tenant, SOON) as allowance:
        with pytest.raises(ResourceExhausted) as caught:
            await allowance.spend_prompt(10)
        assert caught.value.retry_after_seconds == pytest.approx(1.0)
    async with admission.admitted(Tenant("b", tokens_per_minute=1), SOON) as allowance:
        await allowance.spend_prompt(1)


async def test_a_renewed_limit_counts_at_once() -> None:
    admission = make_admission()
    deadline = time.monotonic() + SOON
    async with admission.admitted(Tenant("a", max_requests=1, max_waiting=1), deadline):
        waiting = asyncio.create_task(
            admission.admitted(Tenant("a", max_requests=1, max_waiting=1), deadline).__aenter__()
        )
        await asyncio.sleep(0)
        async with admission.admitted(Tenant("a", max_requests=3), deadline):
            await asyncio.wait_for(waiting, SOON)


async def test_each_answer_counts_as_a_request() -> None:
    admission = make_admission(max_requests=4)
    deadline = time.monotonic() + SOON
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.admitted(Tenant("a"), deadline, Answers(3, "sampling.n")))
        with pytest.raises(ResourceExhausted):
            await stack.enter_async_context(
                admission.admitted(Tenant("b"), deadline, Answers(2, "sampling.n"))
            )
        await stack.enter_async_context(admission.admitted(Tenant("b"), deadline))
    async with admission.admitted(Tenant("a"), deadline, Answers(4, "sampling.n")):
        pass


@pytest.mark.parametrize("tenant", [Tenant("a"), Tenant("a", max_requests=4)])
async def test_more_answers_than_a_limit_ever_allows_are_a_bad_argument(tenant: Tenant) -> None:
    admission = make_admission(max_requests=100 if tenant.max_requests else 4)
    with pytest.raises(InvalidArgument, match=r"sampling\.beam\.width: must be at most 4") as caught:
        await admission.admitted(tenant, SOON, Answers(5, "sampling.beam.width")).__aenter__()
    assert caught.value.metadata["limit"] == "4"


async def test_many_answers_wait_for_their_places_and_no_request_passes_them() -> None:
    admission, tenant = make_admission(), Tenant("a", max_requests=4, max_waiting=8)
    deadline = time.monotonic() + SOON
    order: list[int] = []
    ends = [asyncio.Event() for _ in range(4)]

    async def request(number: int, num_answers: int) -> None:
        async with admission.admitted(tenant, deadline, Answers(num_answers, "sampling.n")):
            order.append(number)
            await ends[number].wait()

    tasks = []
    for number, num_answers in enumerate([2, 3, 1, 4]):
        tasks.append(asyncio.create_task(request(number, num_answers)))
        await asyncio.sleep(0)
    assert order == [0]  # two places are free: the next wants three, and the third waits behind it
    # Who gives up lets those behind it in.
    tasks[1].cancel()
    await asyncio.gather(tasks[1], return_exceptions=True)
    await asyncio.sleep(0)
    assert order == [0, 2]
    ends[0].set()
    ends[2].set()
    await asyncio.gather(tasks[0], tasks[2])
    await asyncio.sleep(0)
    assert order == [0, 2, 3]
    ends[3].set()
    await tasks[3]


def test_generations_of_one_call_do_not_refuse_each_other() -> None:
    admission = make_admission(max_requests=100)
    assert admission.num_at_once(Tenant("a"), num_answers=1) == 32
    assert admission.num_at_once(Tenant("a"), num_answers=8) == 12
    assert admission.num_at_once(Tenant("a", max_requests=4), num_answers=8) == 1


@pytest.mark.parametrize(
    ("params", "answers"),
    [
        (pb.SamplingParams(), Answers(1, "sampling.n")),
        (pb.SamplingParams(n=2, best_of=5), Answers(5, "sampling.best_of")),
        (pb.SamplingParams(beam=pb.BeamParams(width=3)), Answers(3, "sampling.beam.width")),
        (pb.SamplingParams(n=1 << 31), Answers(64, "sampling.n")),
    ],
)
def test_answers_that_a_request_asks_for(params: pb.SamplingParams, answers: Answers) -> None:
    assert answers_of(params) == answers
