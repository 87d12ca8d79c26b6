"""Runs an engine in a thread of its own, for asyncio services.

The event loop never touches the engine: it sends commands, which run between steps, and reads the updates
that each step delivers, one hand-over for the whole batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from quire.engine.engine import Engine, StepSeconds
from quire.engine.sequence import SequenceUpdate

T = TypeVar("T")
logger = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended; no request can be served any more."""


class EngineThread:
    """The thread that owns an engine.

    Args:
        engine: not to be touched by anyone else after ``start``.
        on_step: called in the engine's thread after each step, for metrics.
        on_failure: called in the event loop, once, if the engine fails and the thread ends by itself.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[Engine, int], None] | None = None,
        on_failure: Callable[[EngineStoppedError], None] | None = None,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._commands: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._unsettled: set[Future[Any]] = set()
        """Of commands that have run and will call back; the engine's thread's."""
        self._wake = threading.Condition()
        self._is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._updates: dict[str, asyncio.Queue[SequenceUpdate | Exception]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if engine.tiers is not None and engine.tiers.disk is not None:
            engine.tiers.disk.wake = self._settle

    def _settle(self) -> None:
        """Let the engine take in what has come from disk; called from the disk's threads."""
        with suppress(EngineStoppedError):
            self.post(lambda engine: engine.settle())

    def start(self) -> None:
        """Start stepping; updates go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its present step."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # --- from the event loop ------------------------------------------------------------------------------

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run a command on the engine between two steps and return its result.

        A caller that is cancelled first may or may not have had its command run: follow up with an abort.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        return await asyncio.wrap_future(self.post(command))

    async def call_back(self, command: Callable[[Engine, Callable[[T], None]], object]) -> T:
        """Do the same with a command that calls back, at once or after later steps; return what it says.

        Raises:
            EngineStoppedError: the thread has ended, or ends before that.
        """
        return await asyncio.wrap_future(self._post(command))

    def post(self, command: Callable[[Engine], T]) -> Future[T]:
        """Queue a command without waiting for it; see ``call``."""
        return self._post(lambda engine, settle: settle(command(engine)))

    def _post(self, command: Callable[[Engine, Callable[[T], None]], object]) -> Future[T]:
        future: Future[T] = Future()

        def settle(value: T) -> None:
            self._unsettled.discard(future)
            future.set_result(value)

        def run() -> None:
            # From here on the caller's cancellation cannot half-run the command.
            if not future.set_running_or_notify_cancel():
                return
            self._unsettled.add(future)
            try:
                command(self._engine, settle)
            except Exception as error:
                self._unsettled.discard(future)
                future.set_exception(error)

        with self._wake:
            if self._is_stopping:
                raise _stopped()
            self._commands.append((run, future))
            self._wake.notify()
        return future

    def subscribe(self, request_id: str) -> asyncio.Queue[SequenceUpdate | Exception]:
        """Return the queue that the request's updates arrive in; an exception in it is the last item."""
        queue: asyncio.Queue[SequenceUpdate | Exception] = asyncio.Queue()
        self._updates[request_id] = queue
        return queue

    def is_subscribed(self, request_id: str) -> bool:
        """Whether the request's queue is in use."""
        return request_id in self._updates

    def unsubscribe(self, request_id: str) -> None:
        """Drop the request's queue."""
        self._updates.pop(request_id, None)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            queue = self._updates.get(update.sequence.request_id)
            if queue is not None:
                queue.put_nowait(update)

    def _deliver_failure(self, error: EngineStoppedError) -> None:
        for queue in self._updates.values():
            queue.put_nowait(error)
        if self._on_failure is not None:
            self._on_failure(error)

    # --- in the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        can_step = False
        try:
            while self._run_commands(can_step):
                updates = self._engine.step()
                # With nothing schedulable, only a command (blocks arrive, a request ends) can change that.
                can_step = self._engine.num_stepped > 0
                if updates:
                    self._loop.call_soon_threadsafe(self._deliver, updates)
                if can_step and self._on_step:
                    self._on_step(self._engine, self._engine.num_stepped)
        except Exception as error:
            # A step that fails leaves the ledger in doubt: say so to everyone and serve nothing more.
            logger.exception("the engine failed and stops")
            with self._wake:
                self._is_stopping = True
            failure = EngineStoppedError(f"the engine has failed: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self._deliver_failure, failure)
        for _, future in self._commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(_stopped())
        for future in self._unsettled:
            future.set_exception(_stopped())

    def _run_commands(self, can_step: bool) -> bool:
        """Run what is queued, waiting for a command while no step can be made; False ends the loop."""
        while True:
            with self._wake:
                while not (self._commands or self._is_stopping or (can_step and not self._engine.is_idle)):
                    self._wake.wait()
                if self._is_stopping:
                    return False
                commands, self._commands = self._commands, deque()
            for command, _ in commands:
                command()
            self._engine.grant_blocks()
            if not self._engine.is_idle:
                return True

    @property
    def step_seconds(self) -> StepSeconds:
        """Where the time of the last step went."""
        return self._engine.step_seconds


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the engine has stopped")
