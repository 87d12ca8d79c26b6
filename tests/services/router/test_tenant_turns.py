"""A tenant with many requests delays no other's first tokens, and no request waits for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from quire.services.router.workers import tenant_turns
from quire.services.router.workers.tenant_turns import CREDIT_SECONDS, TenantTurns, Turn
from tests.testing.until import until

NUM_WORKERS = 2


class Requests:
    """Requests that are under way until the test ends them; time passes only if the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = TenantTurns(lambda: NUM_WORKERS, lambda: self.now)
        self.under_way: list[Turn] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.num_begun = Counter[str]()

    def send(self, tenant: str, weight: int = 1, due: float | None = None) -> asyncio.Task[None]:
        """Send a request; its task ends when it begins."""

        async def begin() -> None:
            turn = await self.turns.begin(tenant, weight, 100, self.now if due is None else due, 60.0)
            self.under_way.append(turn)
            self.num_begun[tenant] += 1

        self.tasks.append(asyncio.ensure_future(begin()))
        return self.tasks[-1]

    def count(self, tenant: str) -> int:
        """Return how many requests of a tenant are under way."""
        return sum(turn.tenant == tenant for turn in self.under_way)

    async def end(self, tenant: str, seconds: float = 1.0) -> None:
        """End the oldest request of a tenant after some seconds."""
        self.now += seconds
        turn = next(turn for turn in self.under_way if turn.tenant == tenant)
        self.under_way.remove(turn)
        turn.end()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def requests() -> Requests:
    """A small tenant was here, and then a large one sent many requests."""
    requests = Requests()
    requests.send("small")
    await settle()
    await requests.end("small", 0.1)
    for _ in range(20):
        requests.send("large")
    await settle()
    return requests


async def test_a_tenant_that_is_alone_has_no_limit() -> None:
    requests = Requests()
    for _ in range(100):
        requests.send("large")
    await settle()
    assert requests.count("large") == 100


async def test_many_requests_begin_a_few_at_a_time_while_another_tenant_is_here(requests: Requests) -> None:
    assert requests.count("large") == NUM_WORKERS
    await requests.end("large")
    assert requests.count("large") == NUM_WORKERS
    assert requests.num_begun["large"] == NUM_WORKERS + 1


async def test_many_requests_let_one_that_has_used_less_go_first(requests: Requests) -> None:
    await requests.end("large")
    requests.send("small")
    await settle()
    assert requests.count("small") == 1
    for _ in range(NUM_WORKERS):
        await requests.end("large")
    assert not requests.count("large")
    await requests.end("small")
    assert requests.count("large") == NUM_WORKERS


async def test_tenants_with_few_requests_do_not_wait_for_each_other() -> None:
    requests = Requests()
    for tenant in map(str, range(10)):
        requests.send(tenant)
        await settle()
        await requests.end(tenant)
    for tenant in map(str, range(10)):
        requests.send(tenant)
        requests.send(tenant)
    await settle()
    assert len(requests.under_way) == 20


async def test_the_prompt_tokens_that_wait_are_known(requests: Requests) -> None:
    num_waiting = 20 - requests.count("large")
    assert requests.turns.num_waiting_tokens("large") == 100 * num_waiting > 0
    assert requests.turns.num_waiting_tokens("small") == 0


async def test_a_tenant_is_here_while_its_request_takes_long(requests: Requests) -> None:
    requests.send("small")
    await settle()
    await requests.end("large", 3 * CREDIT_SECONDS)
    assert requests.count("large") == NUM_WORKERS


async def test_many_requests_at_once_use_no_more_time_than_they_take() -> None:
    requests = Requests()
    for _ in range(50):
        requests.send("large")
    requests.send("small")
    await settle()
    await requests.end("small", CREDIT_SECONDS / 2)
    for _ in range(50):
        requests.send("large")
        await requests.end("large", 0.01)
    assert requests.count("large") == NUM_WORKERS


async def test_a_tenant_that_stays_away_limits_nobody(requests: Requests) -> None:
    for _ in range(10):
        await requests.end("large", 2 * CREDIT_SECONDS)
    assert requests.num_begun["large"] == 20


@pytest.mark.parametrize("weight", [1, 3])
async def test_a_tenant_that_always_has_a_request_leaves_others_their_share(weight: int) -> None:
    requests, used = Requests(), Counter[str]()
    requests.send("steady", weight)
    for _ in range(1000):
        requests.send("large")
    await settle()
    for _ in range(300):
        requests.now += 1.0
        for turn in requests.under_way[:]:
            used[turn.tenant] += 1
            await requests.end(turn.tenant, 0.0)
        if not requests.count("steady"):
            requests.send("steady", weight)
            await settle()
    assert used["large"] >= used["steady"] / weight - CREDIT_SECONDS
    assert used["steady"] > 100


async def test_a_request_that_takes_long_keeps_others_waiting_only_until_it_has_used_as_much(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_turns, "WAKE_SECONDS", 0.0)
    await requests.end("large")
    requests.send("small")
    await settle()
    while requests.count("large"):
        await requests.end("large")
    requests.now += 2 * CREDIT_SECONDS
    await until(lambda: requests.count("large") == NUM_WORKERS)
    assert requests.count("small") == 1


async def test_requests_of_a_tenant_begin_in_their_order(requests: Requests) -> None:
    later, sooner = requests.send("large", due=5.0), requests.send("large", due=-5.0)
    await settle()
    await requests.end("large")
    assert sooner.done()
    assert not later.done()


async def test_a_request_that_gives_up_leaves_its_place_to_others(requests: Requests) -> None:
    waiting = [task for task in requests.tasks if not task.done()]
    waiting[0].cancel()
    waiting[-1].cancel()
    await settle()
    while requests.count("large"):
        await requests.end("large")
    assert requests.num_begun["large"] == 18


async def test_a_request_waits_until_its_deadline(requests: Requests) -> None:
    with pytest.raises(TimeoutError):
        await requests.turns.begin("large", 1, 100, 0.0, 0.0)


@pytest.mark.parametrize("seed", range(8))
async def test_no_request_waits_for_ever_in_random_schedules(seed: int) -> None:
    rng, requests = Random(seed), Requests()
    tenants = ["a", "b", "c", "d"]
    for _ in range(400):
        action = rng.random()
        if action < 0.5 or not requests.under_way:
            for _ in range(rng.choice([1, 1, 1, 8])):
                requests.send(rng.choice(tenants), rng.choice([1, 2]), requests.now + rng.uniform(-5, 5))
        elif action < 0.55:
            rng.choice(requests.tasks).cancel()
        else:
            await requests.end(rng.choice(requests.under_way).tenant, rng.expovariate(2.0))
        await settle()
        assert requests.under_way or all(task.done() for task in requests.tasks)
    while requests.under_way:
        await requests.end(rng.choice(requests.under_way).tenant)
    assert all(task.done() for task in requests.tasks)
