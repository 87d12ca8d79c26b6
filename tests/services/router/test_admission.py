"""Who may begin: limits, turns, and places that are never lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from quire.services.errors import DeadlineExceeded, ResourceExhausted
from quire.services.router.admission import Admission
from quire.services.router.metrics import RouterMetrics
from quire.services.router.tenants import Tenant

SOON = 60.0


def make_admission(max_requests: int = 100, clock: Callable[[], float] = time.monotonic) -> Admission:
    return Admission(max_requests, RouterMetrics(CollectorRegistry()), clock)


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


async def test_who_waits_too_long_or_goes_away_takes_no_place() -> None:
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


async def test_a_place_that_comes_with_the_cancellation_is_the_next_ones() -> None:
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


async def test_tokens_are_paid_before_the_prompt_and_while_the_answer_comes() -> None:
    now = 0.0
    admission, tenant = make_admission(clock=lambda: now), Tenant("a", tokens_per_minute=600)
    async with admission.admitted(tenant, SOON) as allowance:
        allowance.spend_prompt(500)
        allowance.spend(150)
    with pytest.raises(ResourceExhausted) as caught:
        async with admission.admitted(tenant, SOON):
            pytest.fail("was admitted in debt")
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("TOKEN_RATE", 5.0)
    now = 5.0
    async with admission.admitted(tenant, SOON) as allowance:
        with pytest.raises(ResourceExhausted) as caught:
            allowance.spend_prompt(10)
        assert caught.value.retry_after_seconds == pytest.approx(1.0)
    async with admission.admitted(Tenant("b", tokens_per_minute=1), SOON) as allowance:
        allowance.spend_prompt(1)


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
