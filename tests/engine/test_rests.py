"""A worker rests while others on its processors compute a prompt for it, and no longer than is fair."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineThread
from quire.engine.runner.lent_processors import LentProcessors, SharedProcessors
from quire.engine.scheduling.rests import CREDIT_SECONDS, MAX_REST_SECONDS, MAX_REST_STEPS, Rests
from quire.engine.sequences.sequence import Sequence, SequenceUpdate
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import make_constant_engine

SECONDS = 20.0
"""Until a thing that does not happen is taken for lost."""


def prompt(name: str, tenant: str, max_tokens: int = 40, num_tokens: int = 4) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, [2] * num_tokens, num_tokens, params, b"", client=tenant)


def engine_with(*tenants: str) -> Engine:
    """Return an engine in which requests of some tenants run."""
    engine = make_constant_engine(8, 64, num_blocks=100)
    for index, tenant in enumerate(tenants):
        engine.add_request(prompt(f"{tenant}-{index}", tenant))
    engine.step()
    return engine


def test_a_worker_rests_for_the_prompt_of_a_client_that_has_fewer_requests() -> None:
    engine = engine_with("large", "large")
    rests = engine.rests
    assert not rests.clients()
    engine.transfers.accept(prompt("coming", "small"))
    assert list(rests.clients()) == ["small"]
    engine.transfers.admit("coming", 5)
    assert not rests.clients()


def test_a_worker_does_not_rest_beside_a_client_with_as_few_requests() -> None:
    engine = engine_with("large", "large", "other")
    engine.transfers.accept(prompt("coming", "small"))
    assert not engine.rests.clients()


def test_a_worker_that_has_nothing_to_compute_need_not_rest() -> None:
    engine = make_constant_engine(8, 64)
    engine.transfers.accept(prompt("coming", "small"))
    engine.transfers.accept(prompt("first", "large"))
    engine.transfers.accept(prompt("second", "large"))
    assert not engine.rests.clients()


def test_rests_take_half_of_the_time_at_most() -> None:
    engine, now = engine_with("large", "large"), [0.0]
    engine.transfers.accept(prompt("coming", "small"))
    rests = Rests(engine.queues, engine.groups, lambda: now[0])
    seconds = {"rest": 0.0, "step": 0.0}
    for _ in range(1000):
        clients = rests.clients()
        with rests.rest_for(clients) if clients else rests.step():
            now[0] += 0.01
        seconds["rest" if clients else "step"] += 0.01
    assert abs(seconds["rest"] - seconds["step"]) <= CREDIT_SECONDS


def test_a_step_counts_in_proportion_to_the_requests() -> None:
    engine, now = engine_with("large", "large", "large", "small"), [0.0]
    rests = Rests(engine.queues, engine.groups, lambda: now[0])
    with rests.step():
        now[0] += 0.8
    engine.abort("small-3")
    engine.transfers.accept(prompt("coming", "small"))
    # The step has counted as 0.6 s of the large client and 0.2 s of the small one.
    for seconds in (0.3, 0.3):
        assert list(rests.clients()) == ["small"]
        with rests.rest_for(["small"]):
            now[0] += seconds
    assert not rests.clients()


def rest_after_a_step(engine: Engine, step_seconds: float = 1 / 32) -> float:
    """Return how many times as long as its step an engine rests after it."""
    now = [0.0]
    rests = Rests(engine.queues, engine.groups, lambda: now[0])
    with rests.step():
        now[0] += step_seconds
    while clients := rests.clients():
        with rests.rest_for(clients):
            now[0] += 1 / 256
    return now[0] / step_seconds - 1


@pytest.mark.parametrize(
    ("num_coming", "num_steps"), [(0, 0), (1, 0), (2, 0), (3, 1.5), (6, 3), (17, MAX_REST_STEPS)]
)
def test_a_worker_rests_while_more_prompts_come_than_answers_run(num_coming: int, num_steps: float) -> None:
    engine = engine_with("one", "one")
    for index in range(num_coming):
        engine.transfers.accept(prompt(f"coming-{index}", "one"))
    assert rest_after_a_step(engine) == num_steps


def test_a_rest_after_a_slow_step_has_a_limit() -> None:
    engine = engine_with("one")
    for index in range(6):
        engine.transfers.accept(prompt(f"coming-{index}", "one"))
    assert rest_after_a_step(engine, step_seconds=4.0) == MAX_REST_SECONDS / 4.0


def test_a_worker_rests_for_larger_batches_of_all_clients_or_none() -> None:
    engine = engine_with("one", "other")
    for index in range(4):
        engine.transfers.accept(prompt(f"coming-{index}", "one"))
    assert rest_after_a_step(engine) == 0
    for index in range(3):
        engine.transfers.accept(prompt(f"coming-other-{index}", "other"))
    assert rest_after_a_step(engine) == 3


def test_a_worker_does_not_rest_for_prompts_that_find_no_room_in_its_steps() -> None:
    engine = make_constant_engine(1, 64, num_blocks=100)
    engine.add_request(prompt("first", "one"))
    engine.step()
    for index in range(4):
        engine.transfers.accept(prompt(f"coming-{index}", "one"))
    assert rest_after_a_step(engine) == 4
    engine.transfers.admit("coming-0", 5)
    assert rest_after_a_step(engine) == 0


def test_a_worker_does_not_rest_for_prompts_that_wait_for_its_blocks() -> None:
    engine = make_constant_engine(8, 64, num_blocks=3)
    engine.add_request(prompt("one-0", "one", max_tokens=4))
    engine.step()
    for index in range(4):
        engine.transfers.accept(prompt(f"coming-{index}", "one", max_tokens=4, num_tokens=8))
    assert rest_after_a_step(engine) == 4
    for index in range(4):
        engine.transfers.reserve(f"coming-{index}", lambda has_blocks: None)
    engine.transfers.grant_blocks()
    assert engine.transfers.num_waiting == 3  # one has room
    assert rest_after_a_step(engine) == 0


async def test_a_worker_rests_only_while_another_one_has_work(tmp_path: Path) -> None:
    path = tmp_path / "processors"
    path.touch()
    own, other = (LentProcessors(SharedProcessors(path, index, (1, 1))) for index in range(2))
    engine = engine_with("one")
    engine.rests.clients = lambda: ["one"]  # type: ignore[method-assign]
    thread = EngineThread(engine, processors=own, rests=True)
    running = next(iter(engine.queues.running)).prompt
    num_tokens = running.num_tokens
    other.occupy()
    thread.start()
    for _ in range(3):
        assert await thread.call(lambda e: running.num_tokens) == num_tokens
    other.vacate()
    async with asyncio.timeout(SECONDS):
        while await thread.call(lambda e: running.num_tokens) == num_tokens:
            pass
    await thread.stop()
    own.close()
    other.close()


async def test_answers_go_on_beside_a_prompt_that_never_comes() -> None:
    engine = engine_with("large", "large")
    thread = EngineThread(engine, rests=True)
    ended = asyncio.Event()

    def receive(update: SequenceUpdate | Exception) -> None:
        if isinstance(update, SequenceUpdate) and update.status.is_finished:
            ended.set()

    thread.subscribe("large-1", receive)
    thread.start()
    await thread.call(lambda e: e.transfers.accept(prompt("coming", "small")))
    await asyncio.wait_for(ended.wait(), SECONDS)
    await thread.stop()
