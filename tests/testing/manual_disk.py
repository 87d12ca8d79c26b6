"""A disk cache that reads and writes when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from quire.engine.kv_cache.disk_cache import DiskCache

HEADER_BYTES = 32
"""Bytes of a file before its block."""


class ManualExecutor(Executor):
    """Runs calls when it is told to, in the thread that tells it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        """Run the calls so far, and those that they submit."""
        while self.calls:
            self.calls.pop(0)()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.run()


def open_disk(
    folder: Path,
    writer: Executor | None = None,
    reader: Executor | None = None,
    *,
    block_bytes: int = 64,
    num_blocks: int = 4,
    identity: str = "same",
    clock: Callable[[], float] = time.monotonic,
) -> DiskCache:
    """Return a disk cache that holds ``num_blocks`` blocks.

    The writer also reads if there is no reader. Without both, the cache has threads of its own.
    """
    num_bytes = num_blocks * (block_bytes + HEADER_BYTES)
    return DiskCache(
        folder, num_bytes, block_bytes, identity, writer=writer, reader=reader or writer, clock=clock
    )
