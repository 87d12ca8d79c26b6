"""Commands, updates and the end of the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.sampling_params import SamplingParams
from quire.engine.sequence import Sequence

BLOCK_SIZE, NUM_BLOCKS = 4, 8
SECONDS = 20.0
"""Until a thing that does not happen is taken for lost."""


@pytest.fixture
def engine(make_constant_engine: Callable[..., Engine]) -> Engine:
    return make_constant_engine(max_num_seqs=4, max_num_batched_tokens=64)


def prompt(name: str, token: int, num_tokens: int, max_tokens: int = 2) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, [token] * num_tokens, num_tokens, params, b"")


def reserve(name: str) -> Callable[[Engine, Callable[[bool], None]], None]:
    return lambda engine, on_settled: engine.reserve(name, on_settled)


async def test_blocks_of_a_request_that_its_first_token_ends_go_to_the_next(engine: Engine) -> None:
    thread = EngineThread(engine)
    thread.start()
    await thread.call(lambda e: e.accept(prompt("first", 2, 24, max_tokens=1)))
    await thread.call(lambda e: e.accept(prompt("second", 3, 24)))
    assert await thread.call_back(reserve("first"))
    second = asyncio.create_task(thread.call_back(reserve("second")))
    await asyncio.sleep(0)  # it has posted its command
    assert await thread.call(lambda e: e.num_waiting_for_blocks) == 1
    update = await thread.call(lambda e: e.admit("first", 5))
    assert update.status.is_finished
    assert await asyncio.wait_for(second, SECONDS)
    await thread.stop()


async def test_blocks_of_a_request_that_preempts_itself_go_to_a_transfer(engine: Engine) -> None:
    thread = EngineThread(engine)
    thread.start()
    cached = thread.subscribe("cached")
    await thread.call(lambda e: e.add(prompt("cached", 2, 12)))
    while not (await asyncio.wait_for(cached.get(), SECONDS)).status.is_finished:  # type: ignore[union-attr]
        pass

    def begin(engine: Engine) -> int:
        engine.add(prompt("running", 3, 17, max_tokens=12))
        engine.step()
        return engine.accept(prompt("transfer", 2, 24))

    # Five blocks and three cached ones: for one more, the running request gives up its own.
    assert await thread.call(begin) == 3
    assert await asyncio.wait_for(thread.call_back(reserve("transfer")), SECONDS)
    await thread.stop()


async def test_a_request_that_ends_waits_no_longer_for_blocks(engine: Engine) -> None:
    thread = EngineThread(engine)
    thread.start()
    for name in ("first", "second"):
        await thread.call(lambda e, name=name: e.accept(prompt(name, 2, 24)))  # type: ignore[misc]
    assert await thread.call_back(reserve("first"))
    second = asyncio.create_task(thread.call_back(reserve("second")))
    await asyncio.sleep(0)  # it has posted its command
    assert await thread.call(lambda e: e.num_waiting_for_blocks) == 1
    await thread.call(lambda e: e.abort("second"))
    assert await asyncio.wait_for(second, SECONDS) is False
    await thread.stop()


async def test_a_failed_step_ends_everything_that_waits(engine: Engine) -> None:
    failures: list[EngineStoppedError] = []
    thread = EngineThread(engine, on_failure=failures.append)
    thread.start()
    updates = thread.subscribe("running")
    for name in ("first", "second"):
        await thread.call(lambda e, name=name: e.accept(prompt(name, 2, 24)))  # type: ignore[misc]
    assert await thread.call_back(reserve("first"))
    second = asyncio.create_task(thread.call_back(reserve("second")))
    await asyncio.sleep(0)  # it has posted its command
    assert await thread.call(lambda e: e.num_waiting_for_blocks) == 1

    def fail(scheduled: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    def run(engine: Engine) -> None:
        engine.runner.forward = fail  # type: ignore[method-assign]
        engine.add(prompt("running", 3, 4))

    await thread.call(run)
    error = await asyncio.wait_for(updates.get(), SECONDS)
    assert isinstance(error, EngineStoppedError)
    assert "RuntimeError: out of memory" in str(error)
    with pytest.raises(EngineStoppedError):
        await asyncio.wait_for(second, SECONDS)
    assert failures == [error]
    with pytest.raises(EngineStoppedError):
        await thread.call(lambda e: None)


async def test_stopping_fails_the_commands_that_are_left_though_some_were_cancelled(engine: Engine) -> None:
    thread = EngineThread(engine)
    thread.start()
    has_begun, goes_on = threading.Event(), threading.Event()

    def pause(engine: Engine) -> None:
        has_begun.set()
        goes_on.wait()

    paused = thread.post(pause)
    await asyncio.to_thread(has_begun.wait)
    cancelled, left = thread.post(lambda e: 1), thread.post(lambda e: 2)
    assert cancelled.cancel()
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait_for(stopping, SECONDS)
    assert paused.result() is None
    with pytest.raises(EngineStoppedError):
        left.result(SECONDS)
