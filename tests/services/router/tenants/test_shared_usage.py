"""The limits of a tenant over several routers, kept in a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from prometheus_client import CollectorRegistry

from quire.kvindex.redis_index import publisher_client
from quire.rpc.errors import DeadlineExceeded, ResourceExhausted
from quire.services.local.redis_process import RedisProcess
from quire.services.requests.validation import Answers
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.tenants import shared_places, usage_store
from quire.services.router.tenants.admission import Admission
from quire.services.router.tenants.api_keys import Tenant
from quire.services.router.tenants.shared_usage import SharedUsage, shared_usage
from tests.testing.until import until

WAIT_SECONDS = 10.0


class Routers:
    """The admissions of several routers, and their usage of one Redis."""

    def __init__(self, redis: RedisProcess, stack: AsyncExitStack) -> None:
        self._redis = redis
        self._stack = stack
        self.usages: list[SharedUsage] = []

    async def add(self) -> Admission:
        # With a reader's 50 ms, a router on a busy machine would apply the limits by itself.
        client = publisher_client(self._redis.router_url)
        self._stack.push_async_callback(client.aclose)
        usage = await self._stack.enter_async_context(shared_usage(client))
        self.usages.append(usage)
        return Admission(100, RouterMetrics(CollectorRegistry()), time.monotonic, usage)

    async def until_waiting(self, tenant: Tenant, *numbers: int) -> None:
        """Wait until so many requests of a tenant wait at each router."""
        places = [usage.places(tenant) for usage in self.usages]
        await until(lambda: [len(each._waiting) for each in places] == [*numbers])

    async def leases(self, tenant: Tenant) -> dict[int, int]:
        """Return the number of running requests of each record in Redis, by the time when its lease ends."""
        async with aclosing(publisher_client(self._redis.router_url)) as client:
            records = await client.hgetall(usage_store.RECORDS + tenant.name)
        rows = (tuple(map(int, each.split())) for each in records.values())
        return {end: num_running for num_running, _, end in rows}


@pytest.fixture
async def routers(redis: RedisProcess, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Routers]:
    monkeypatch.setattr(usage_store, "CALL_SECONDS", 5.0)
    async with AsyncExitStack() as stack:
        yield Routers(redis, stack)


def soon(seconds: float = WAIT_SECONDS) -> float:
    return time.monotonic() + seconds


async def begin(admission: Admission, tenant: Tenant, number: int = 1) -> AsyncExitStack:
    stack = AsyncExitStack()
    await stack.enter_async_context(admission.admitted(tenant, soon(), Answers(number, "n")))
    return stack


async def test_running_requests_of_all_routers_count_together(routers: Routers) -> None:
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("running", max_requests=3)
    one, two = await begin(first, tenant, 2), await begin(second, tenant)
    for admission in (first, second):
        with pytest.raises(ResourceExhausted) as caught:
            await begin(admission, tenant)
        assert (caught.value.reason, caught.value.metadata) == ("TENANT_REQUESTS", {"limit": "3"})
    await one.aclose()
    three = await begin(second, tenant, 2)
    with pytest.raises(ResourceExhausted):
        await begin(first, tenant)
    await two.aclose()
    await three.aclose()
    for admission in (first, second):
        await (await begin(admission, tenant, 3)).aclose()


async def test_hundreds_of_requests_at_once_are_all_counted(routers: Routers) -> None:
    """With the default limit of the client's connections, the rest were admitted without being counted."""
    await routers.add()
    (usage,) = routers.usages
    tenant = Tenant("burst", tokens_per_minute=300)
    waits = await asyncio.gather(*(usage.take_tokens(tenant, 1) for _ in range(300)))
    assert waits == [0.0] * 300
    assert (await usage.take_tokens(tenant, 300) or 0.0) > 30.0


async def test_requests_wait_for_those_of_another_router(routers: Routers) -> None:
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("waiting", max_requests=1, max_waiting=2)
    running = await begin(first, tenant)
    waiting = [asyncio.create_task(begin(admission, tenant)) for admission in (second, first)]
    await routers.until_waiting(tenant, 1, 1)
    assert not any(task.done() for task in waiting)
    for admission in (first, second):
        with pytest.raises(ResourceExhausted):
            await begin(admission, tenant)
    await running.aclose()
    while waiting:
        done, left = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        await done.pop().result().aclose()
        waiting = list(left)


async def test_one_routers_requests_wait_in_order(routers: Routers) -> None:
    admission, other = await routers.add(), await routers.add()
    tenant, order = Tenant("order", max_requests=1, max_waiting=5), []
    running = await begin(other, tenant)

    async def request(number: int) -> None:
        async with admission.admitted(tenant, soon()):
            order.append(number)

    tasks = []
    for number in range(5):
        tasks.append(asyncio.create_task(request(number)))
        await routers.until_waiting(tenant, number + 1, 0)
    with pytest.raises(ResourceExhausted):
        await begin(admission, tenant)
    tasks[2].cancel()
    await running.aclose()
    await asyncio.wait(tasks, timeout=WAIT_SECONDS)
    assert order == [0, 1, 3, 4]


async def test_a_request_that_gives_up_frees_its_place_in_line(routers: Routers) -> None:
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("impatient", max_requests=1, max_waiting=1)
    running = await begin(first, tenant)
    with pytest.raises(DeadlineExceeded):
        async with second.admitted(tenant, soon(0.1)):
            pass
    for usage in routers.usages:
        await usage.places(tenant).record()
    waiting = asyncio.create_task(begin(first, tenant))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await running.aclose()
    await (await waiting).aclose()


async def test_a_killed_routers_requests_stop_counting(routers: Routers, monkeypatch: Any) -> None:
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("killed", max_requests=1)
    running = await begin(first, tenant)
    places = routers.usages[0].places(tenant)
    # A killed router sends nothing any more.
    monkeypatch.setattr(routers.usages[0], "_places", {})
    with pytest.raises(ResourceExhausted):
        await begin(second, tenant)
    # The last that it sent is a lease that ends at once.
    monkeypatch.setattr(usage_store, "LEASE_SECONDS", 0.001)
    await places.record()

    async def begun() -> AsyncExitStack | None:
        with suppress(ResourceExhausted):
            return await begin(second, tenant)
        return None

    await (await until(begun)).aclose()
    await running.aclose()


async def test_a_long_request_keeps_its_lease(routers: Routers, monkeypatch: Any) -> None:
    monkeypatch.setattr("quire.services.router.tenants.shared_usage.FLUSHES_PER_BEAT", 1)
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("long", max_requests=1)
    running = await begin(first, tenant)
    [end] = await routers.leases(tenant)

    async def renewed() -> dict[int, int] | None:
        leases = await routers.leases(tenant)
        return leases if min(leases) > end else None

    assert [*(await until(renewed)).values()] == [1]
    with pytest.raises(ResourceExhausted):
        await begin(second, tenant)
    await running.aclose()
    await (await begin(second, tenant)).aclose()


async def test_all_routers_charge_one_bucket(routers: Routers, monkeypatch: Any) -> None:
    charge, charges = usage_store.UsageStore.charge, asyncio.Queue[int]()

    async def charged(store: usage_store.UsageStore, tenant: Tenant, num_tokens: int) -> None:
        await charge(store, tenant, num_tokens)
        charges.put_nowait(num_tokens)

    monkeypatch.setattr(usage_store.UsageStore, "charge", charged)
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("tokens", tokens_per_minute=600)
    async with first.admitted(tenant, soon()) as allowance:
        await allowance.spend_prompt(400)
        allowance.spend(150)
    assert await asyncio.wait_for(charges.get(), WAIT_SECONDS) == 150
    async with second.admitted(tenant, soon()) as allowance:
        with pytest.raises(ResourceExhausted) as caught:
            await allowance.spend_prompt(100)
    assert caught.value.reason == "TOKEN_RATE"
    async with second.admitted(tenant, soon()) as allowance:
        allowance.spend(200)
    # The debt reaches the first router too, before it has tokenized anything.
    assert await asyncio.wait_for(charges.get(), WAIT_SECONDS) == 200
    with pytest.raises(ResourceExhausted):
        await begin(first, tenant)


async def test_the_time_to_wait_is_exact(routers: Routers) -> None:
    first, second = await routers.add(), await routers.add()
    tenant = Tenant("exact", tokens_per_minute=12_000)
    async with first.admitted(tenant, soon()) as allowance:
        await allowance.spend_prompt(12_000)
        with pytest.raises(ResourceExhausted) as caught:
            await allowance.spend_prompt(200)
    assert caught.value.retry_after_seconds is not None
    assert 0 < caught.value.retry_after_seconds <= 1.0
    await asyncio.sleep(caught.value.retry_after_seconds)
    async with second.admitted(tenant, soon()) as allowance:
        await allowance.spend_prompt(200)


async def test_without_an_answer_of_redis_each_router_applies_the_limits_itself(
    routers: Routers, capsys: Any, monkeypatch: Any
) -> None:
    events: list[str] = []
    monkeypatch.setattr(usage_store._log, "warning", lambda event, **fields: events.append(event))
    monkeypatch.setattr(usage_store._log, "info", lambda event, **fields: events.append(event))
    own = RedisProcess()
    async with AsyncExitStack() as stack:
        stack.callback(own.stop)
        separate = Routers(own, stack)
        first, second = await separate.add(), await separate.add()
        tenant = Tenant("down", max_requests=1, max_waiting=1, tokens_per_minute=100)
        before = await begin(first, tenant)
        own.stop()
        running = await begin(second, tenant)
        waiting = asyncio.create_task(begin(second, tenant))
        await separate.until_waiting(tenant, 0, 1)
        assert not waiting.done()
        with pytest.raises(ResourceExhausted):
            await begin(second, tenant)
        await running.aclose()
        async with await asyncio.wait_for(waiting, WAIT_SECONDS):
            pass
        await before.aclose()
        async with first.admitted(tenant, soon()) as allowance:
            await allowance.spend_prompt(90)
            with pytest.raises(ResourceExhausted):
                await allowance.spend_prompt(90)
    assert events.count("tenant_limits_separate") == 2  # once for each router


async def test_a_tenant_without_limits_costs_no_round_trip(routers: Routers, monkeypatch: Any) -> None:
    admission = await routers.add()
    asking = AsyncMock(side_effect=AssertionError("asked Redis"))
    monkeypatch.setattr(usage_store.UsageStore, "_call", asking)
    async with admission.admitted(Tenant("free"), soon()) as allowance:
        await allowance.spend_prompt(1000)
        allowance.spend(1000)
        await asyncio.sleep(0.3)


async def test_many_requests_never_exceed_the_limit(routers: Routers, monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_places, "POLL_SECONDS", 0.005)
    admissions = [await routers.add() for _ in range(3)]
    tenant, running, most = Tenant("many", max_requests=4, max_waiting=100), 0, 0

    async def request(number: int) -> None:
        nonlocal running, most
        async with admissions[number % 3].admitted(tenant, soon(30), Answers(1 + number % 2, "n")):
            running += 1 + number % 2
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1 + number % 2

    await asyncio.gather(*map(request, range(60)))
    assert 2 <= most <= 4


async def test_a_cancellation_that_comes_with_a_freed_place_is_not_lost() -> None:
    silent: Any = SimpleNamespace(take_places=AsyncMock(return_value=None))
    places = shared_places.SharedPlaces(Tenant("a", max_requests=1, max_waiting=1), silent)
    await places.enter(1)
    waiting = asyncio.create_task(places.enter(1))
    for _ in range(3):
        await asyncio.sleep(0)
    await places.leave(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await places.enter(1)
