"""Copies that no request waits for: one at a time, only while the pool has room, never beyond their time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.sequences.sequence import Sequence
from quire.protos import worker_pb2
from quire.services.worker.blocks import block_copier
from quire.services.worker.blocks.block_copier import MAX_USED_SHARE, BlockCopier

NUM_BLOCKS = 10


class Engine:
    """An engine whose load the test sets; ``asked`` counts the questions after it."""

    def __init__(self) -> None:
        self.num_used = 0
        self.asked = asyncio.Event()

    async def call(self, command: Any) -> Any:
        self.asked.set()
        counts = SimpleNamespace(used=self.num_used)
        pool = SimpleNamespace(counts=counts, num_blocks=NUM_BLOCKS)
        return command(SimpleNamespace(pool=pool))


class Puller:
    """Pulls when it is told to, and keeps what it pulls."""

    def __init__(self) -> None:
        self.pulled: list[Sequence] = []
        self.num_running = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def pull(self, sequence: Sequence, source: worker_pb2.PullSource) -> worker_pb2.PullSummary:
        self.num_running += 1
        assert self.num_running == 1
        self.pulled.append(sequence)
        try:
            await self.may_end.wait()
            if self.error is not None:
                raise self.error
            return worker_pb2.PullSummary(num_blocks=source.num_blocks)
        finally:
            self.num_running -= 1


class Setup:
    """A copier with an engine and a puller."""

    def __init__(self) -> None:
        self.engine, self.puller = Engine(), Puller()
        engine: Any = self.engine
        puller: Any = self.puller
        self.copier = BlockCopier(engine, puller)

    def copy(self, name: str = "w", timeout_ms: int = 5000) -> asyncio.Task[worker_pb2.PullSummary]:
        source = worker_pb2.PullSource(num_blocks=2, timeout_ms=timeout_ms)
        request = worker_pb2.CopyBlocksRequest(sequence_id=name, token_ids=[5, 6, 7], pull_from=source)
        return asyncio.create_task(self.copier.copy(request, b"root"))


@pytest.fixture
async def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(block_copier, "POLL_SECONDS", 0.0)
    return Setup()


async def test_copies_run_one_after_the_other(setup: Setup) -> None:
    setup.puller.may_end.set()
    copies = [setup.copy(name) for name in "abc"]
    assert [(await each).num_blocks for each in copies] == [2, 2, 2]
    assert [each.attempt_id for each in setup.puller.pulled] == ["a", "b", "c"]
    first = setup.puller.pulled[0]
    assert (first.token_ids, first.num_prompt_tokens, first.root_hash) == ([5, 6, 7], 3, b"root")


async def test_a_copy_waits_until_the_pool_has_room(setup: Setup) -> None:
    setup.puller.may_end.set()
    setup.engine.num_used = int(NUM_BLOCKS * MAX_USED_SHARE) + 1
    copying = setup.copy()
    for _ in range(3):
        setup.engine.asked.clear()
        await asyncio.wait_for(setup.engine.asked.wait(), 5)
    assert setup.puller.pulled == []
    setup.engine.num_used = int(NUM_BLOCKS * MAX_USED_SHARE)
    assert (await asyncio.wait_for(copying, 5)).num_blocks == 2


async def test_a_copy_that_times_out_releases_its_turn(setup: Setup) -> None:
    late = await setup.copy("late", timeout_ms=10)
    assert late.failure == "busy"
    first, waiting = setup.copy("first"), setup.copy("waiting", timeout_ms=10)
    assert (await waiting).failure == "busy", "it waits for its turn within its own time"
    setup.puller.may_end.set()
    assert (await first).failure == ""


async def test_a_copy_that_fails_gives_its_turn_back(setup: Setup) -> None:
    setup.puller.may_end.set()
    setup.puller.error = RuntimeError("scripted")
    with pytest.raises(RuntimeError):
        await setup.copy()
    setup.puller.error = None
    assert (await asyncio.wait_for(setup.copy(), 5)).num_blocks == 2
