"""Threads that a process does not wait for when it ends, for calls to a disk that may never answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class DaemonThreads(Executor):
    """Runs calls in their order. Unlike a ``ThreadPoolExecutor``, it lets the process end during a call.

    Args:
        num_threads: number of threads; calls keep their order only in one.
        name: of the threads.
        shutdown_seconds: most seconds that ``shutdown`` waits for the calls.
    """

    def __init__(self, num_threads: int, name: str, shutdown_seconds: float) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._shutdown_seconds = shutdown_seconds
        self._threads = [Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end after the queued calls, and wait for them at most ``shutdown_seconds``."""
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + self._shutdown_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            future, call = queued
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
