"""The engine's blocks as others copy them, from an engine's thread that runs, and one that has stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.engine.engine_thread import EngineStoppedError, EngineThread
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.errors import TransferError
from quire.kvtransfer.frame import Frame
from quire.services.worker.blocks.pool_source import PoolSource

LAYOUT = KvLayout(1, 1, 4, 8, "float16", "digest", "float16", "float32-1")
HASHES = [bytes([index]) * 16 for index in range(3)]


class Engine:
    """Keeps the commands in order; two blocks are present."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.pins = SimpleNamespace(unpin=lambda name: self.events.append(("unpin", name)))

    def prefetch(self, block_hashes: Sequence[bytes]) -> None:
        self.events.append("prefetch")

    def pin(self, name: str, block_hashes: Sequence[bytes]) -> list[int]:
        self.events.append(("pin", name, len(block_hashes)))
        return [4, 5]


class Thread:
    """Runs commands at once, or refuses them as a thread that has stopped does."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_stopped = False

    async def call(self, command: Callable[[Any], Any]) -> Any:
        return self.post(command).result()

    async def call_when_read(
        self, block_hashes: Callable[[Any], Sequence[bytes]], command: Callable[[Any], Any]
    ) -> Any:
        return self.post(lambda engine: (engine.prefetch(block_hashes(engine)), command(engine))[1]).result()

    def post(self, command: Callable[[Any], Any]) -> Future[Any]:
        if self.is_stopped:
            raise EngineStoppedError("the engine has stopped")
        future: Future[Any] = Future()
        future.set_result(command(self._engine))
        return future


def source() -> tuple[PoolSource, Thread, Engine]:
    engine = Engine()
    thread = Thread(engine)
    size = LAYOUT.block_bytes
    reader: Any = SimpleNamespace(frame=lambda at, name, block, **_: Frame(at, name, bytes([block]) * size))
    made = PoolSource(cast(EngineThread, thread), reader, LAYOUT, "epoch")
    return made, thread, engine


async def test_blocks_of_lower_tiers_are_fetched_before_the_pin() -> None:
    pool, _, engine = source()
    assert list(await pool.pin("lease", HASHES)) == [4, 5]
    pool.unpin("lease")
    assert engine.events == ["prefetch", ("pin", "lease", 3), ("unpin", "lease")]
    assert pool.frame(0, HASHES[0], 4) == Frame(0, HASHES[0], bytes([4]) * LAYOUT.block_bytes)


async def test_a_worker_that_stops_refuses_a_pin_and_needs_no_unpin() -> None:
    pool, thread, engine = source()
    thread.is_stopped = True
    with pytest.raises(TransferError, match="the engine has stopped"):
        await pool.pin("lease", HASHES)
    pool.unpin("lease")
    assert engine.events == []
