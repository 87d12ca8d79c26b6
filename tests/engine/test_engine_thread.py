"""Commands, updates and the end of the engine's thread."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from quire.engine import engine_thread
from quire.engine.engine import Engine
from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.engine.kv_cache import disk_cache
from quire.engine.kv_cache.disk_cache import DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.runner.step_watch import StepWatch
from quire.engine.sequences.sequence import Sequence, SequenceUpdate
from quire.kvindex.kv_layout import KvShape
from quire.sampling.params import SamplingParams
from tests.testing.constant_engine import ConstantRunner, make_constant_engine

BLOCK_SIZE, NUM_BLOCKS = 4, 8
BLOCK = b"a block's hash.."
SECONDS = 20.0
"""Until a thing that does not happen is taken for lost."""


@pytest.fixture
def engine() -> Engine:
    return make_constant_engine(max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
def runner(engine: Engine) -> ConstantRunner:
    assert isinstance(engine.runner, ConstantRunner)
    return engine.runner


@pytest.fixture
async def thread(engine: Engine) -> AsyncIterator[EngineThread]:
    """The running thread of the engine."""
    thread = EngineThread(engine)
    thread.start()
    yield thread
    await thread.stop()


def prompt(name: str, token: int, num_tokens: int, max_tokens: int = 2) -> Sequence:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Sequence(name, [token] * num_tokens, num_tokens, params, b"")


def accept(sequence: Sequence) -> Callable[[Engine], int]:
    return lambda engine: engine.transfers.accept(sequence)


def subscribed(thread: EngineThread, attempt_id: str) -> asyncio.Queue[SequenceUpdate | Exception]:
    """Return a queue with the updates of a request."""
    updates: asyncio.Queue[SequenceUpdate | Exception] = asyncio.Queue()
    thread.subscribe(attempt_id, updates.put_nowait)
    return updates


async def finished(updates: asyncio.Queue[SequenceUpdate | Exception]) -> None:
    """Wait until a request has finished."""
    while True:
        update = await asyncio.wait_for(updates.get(), SECONDS)
        assert isinstance(update, SequenceUpdate)
        if update.status.is_finished:
            return


def reserve(name: str) -> Callable[[Engine, Callable[[bool], None]], None]:
    return lambda engine, on_settled: engine.transfers.reserve(name, on_settled)


async def test_blocks_of_a_request_that_its_first_token_ends_are_granted_to_the_next(
    thread: EngineThread,
) -> None:
    await thread.call(accept(prompt("first", 2, 24, max_tokens=1)))
    await thread.call(accept(prompt("second", 3, 24)))
    assert await thread.call_back(reserve("first"))
    second = asyncio.create_task(thread.call_back(reserve("second")))
    await asyncio.sleep(0)  # it has posted its command
    assert await thread.call(lambda e: e.transfers.num_waiting) == 1
    update = await thread.call(lambda e: e.transfers.admit("first", 5))
    assert update.status.is_finished
    assert await asyncio.wait_for(second, SECONDS)


async def test_a_transfer_gives_way_to_an_older_request_that_it_holds_up(thread: EngineThread) -> None:
    cached, running = subscribed(thread, "cached"), subscribed(thread, "running")
    await thread.call(lambda e: e.add_request(prompt("cached", 2, 12)))
    await finished(cached)

    def begin(engine: Engine) -> int:
        engine.add_request(prompt("running", 3, 17, max_tokens=12))
        engine.step()
        return engine.transfers.accept(prompt("transfer", 2, 24))

    # Five blocks and three cached ones: for one more, the running request gives up its own.
    assert await thread.call(begin) == 3
    assert not await asyncio.wait_for(thread.call_back(reserve("transfer")), SECONDS)
    # No command has to wake the engine: the step that ended the transfer goes on with the request.
    await finished(running)


def disk_with_block(folder: Path, block: bytes) -> tuple[HostCache, DiskCache]:
    """Return an empty host cache, and a disk cache with a block of an earlier process."""
    shape = KvShape(1, 1, BLOCK_SIZE, 1, "float32")
    earlier = DiskCache(folder, 4096, shape.block_bytes, "same")
    earlier.store(block, None, bytes(shape.block_bytes))
    earlier.close()
    host = HostCache(KvMemory(shape, 2, torch.device("cpu")))
    return host, DiskCache(folder, 4096, shape.block_bytes, "same")


async def test_a_disk_read_wakes_an_engine_that_rests(tmp_path: Path) -> None:
    host, disk = disk_with_block(tmp_path, BLOCK)
    thread = EngineThread(make_constant_engine(4, 64, host_cache=host, disk_cache=disk))
    thread.start()
    assert await asyncio.wait_for(thread.call_when_read(lambda e: [BLOCK], lambda e: BLOCK in host), SECONDS)
    await thread.stop()
    disk.close()


async def test_a_disk_that_does_not_answer_delays_a_request_and_the_end_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "READ_SECONDS", 0.05)
    monkeypatch.setattr(disk_cache, "CLOSE_SECONDS", 0.05)
    host, disk = disk_with_block(tmp_path, BLOCK)
    path = tmp_path / f"{BLOCK.hex()}.kv"
    path.unlink()
    os.mkfifo(path)  # a reader waits for a writer
    thread = EngineThread(make_constant_engine(4, 64, host_cache=host, disk_cache=disk))
    thread.start()
    for _ in range(2):  # the second request finds that the disk has stalled
        is_read = thread.call_when_read(lambda e: [BLOCK], lambda e: BLOCK in host)
        assert not await asyncio.wait_for(is_read, SECONDS)
    assert await thread.call(lambda e: e.tiers.counts.disk_errors if e.tiers else None) == {"stalled": 1}
    await thread.stop()
    await asyncio.wait_for(asyncio.to_thread(disk.close), SECONDS)
    os.close(os.open(path, os.O_WRONLY))  # the reader ends


async def one_waits(thread: EngineThread) -> asyncio.Task[bool]:
    """Accept two transfers; the blocks suffice for the first one. Return the wait of the second one."""
    for name in ("first", "second"):
        await thread.call(accept(prompt(name, 2, 24)))
    assert await thread.call_back(reserve("first"))
    second = asyncio.create_task(thread.call_back(reserve("second")))
    await asyncio.sleep(0)  # it has posted its command
    assert await thread.call(lambda e: e.transfers.num_waiting) == 1
    return second


async def test_a_request_that_ends_waits_no_longer_for_blocks(thread: EngineThread) -> None:
    second = await one_waits(thread)
    await thread.call(lambda e: e.abort("second"))
    assert await asyncio.wait_for(second, SECONDS) is False


async def test_a_failed_step_ends_everything_that_waits(engine: Engine, runner: ConstantRunner) -> None:
    failures: list[EngineStoppedError] = []
    thread = EngineThread(engine, on_failure=failures.append)
    thread.start()
    updates = subscribed(thread, "first")
    second = await one_waits(thread)
    runner.before_forward = Mock(side_effect=RuntimeError("out of memory"))
    await thread.call(lambda e: e.transfers.admit("first", 5))
    error = await asyncio.wait_for(updates.get(), SECONDS)
    assert isinstance(error, EngineStoppedError)
    assert "RuntimeError: out of memory" in str(error)
    with pytest.raises(EngineStoppedError):
        await asyncio.wait_for(second, SECONDS)
    assert failures == [error]
    with pytest.raises(EngineStoppedError):
        await thread.call(lambda e: None)


async def hold_up(thread: EngineThread) -> threading.Event:
    """Return when a command holds up the thread; it goes on when the event is set."""
    has_begun, goes_on = threading.Event(), threading.Event()

    def pause(engine: Engine) -> None:
        has_begun.set()
        goes_on.wait()

    thread.post(pause)
    await asyncio.to_thread(has_begun.wait)
    return goes_on


async def test_stopping_fails_the_remaining_commands_though_some_were_cancelled(thread: EngineThread) -> None:
    goes_on = await hold_up(thread)
    cancelled, left = thread.post(lambda e: 1), thread.post(lambda e: 2)
    assert cancelled.cancel()
    stopping = asyncio.create_task(thread.stop())
    await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait_for(stopping, SECONDS)
    with pytest.raises(EngineStoppedError):
        left.result(SECONDS)


async def test_a_stuck_thread_is_given_up_and_everything_that_waits_ends(
    engine: Engine, runner: ConstantRunner
) -> None:
    failures: list[EngineStoppedError] = []
    stalls: list[bool] = []
    thread = EngineThread(engine, on_failure=failures.append, on_stall=stalls.append, watch=StepWatch(0.1))
    thread.start()
    updates = subscribed(thread, "running")
    for name in ("first", "second"):
        await thread.call(accept(prompt(name, 2, 24)))
    assert await thread.call_back(reserve("first"))
    goes_on = threading.Event()

    def hang() -> None:
        goes_on.wait()
        raise RuntimeError("the device was reset")

    runner.before_forward = hang
    waiting = asyncio.create_task(thread.call_back(reserve("second")))
    await thread.call(lambda e: e.add_request(prompt("running", 3, 4)))
    late = asyncio.create_task(thread.call(lambda e: None))
    await asyncio.wait_for(thread.watch(), SECONDS)
    assert thread.is_stalled
    assert stalls == [True]
    error = await asyncio.wait_for(updates.get(), SECONDS)
    assert isinstance(error, EngineStoppedError)
    assert "is stuck" in str(error)
    for each in (waiting, late):
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(each, SECONDS)
    with pytest.raises(EngineStoppedError):
        await thread.call(lambda e: None)
    goes_on.set()
    assert await thread.stop()
    await asyncio.sleep(0)  # what the thread says at its end
    assert failures == [error]


async def test_an_engine_that_recovers_from_a_stall_reports_it(
    engine: Engine, runner: ConstantRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.runner.step_watch.UNKNOWN_STALL_SECONDS", 0.2)
    stalls: asyncio.Queue[bool] = asyncio.Queue()
    thread = EngineThread(engine, on_stall=stalls.put_nowait, watch=StepWatch(SECONDS))
    thread.start()
    watching = asyncio.create_task(thread.watch())
    goes_on = threading.Event()

    def hold() -> None:
        goes_on.wait(SECONDS)

    runner.before_forward = hold
    await thread.call(lambda e: e.add_request(prompt("held", 3, 4)))
    assert await asyncio.wait_for(stalls.get(), SECONDS)
    goes_on.set()
    assert not await asyncio.wait_for(stalls.get(), SECONDS)
    watching.cancel()
    await thread.stop()


async def test_a_step_that_does_not_end_does_not_hold_up_the_stop(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_thread, "JOIN_SECONDS", 0.05)
    thread = EngineThread(engine)
    thread.start()
    goes_on = await hold_up(thread)
    assert await asyncio.wait_for(thread.stop(), SECONDS) is False
    goes_on.set()
    monkeypatch.setattr(engine_thread, "JOIN_SECONDS", SECONDS)
    assert await thread.stop()
