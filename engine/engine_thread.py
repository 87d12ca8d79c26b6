"""Runs an engine in a dedicated thread, for asyncio services.

The event loop never touches the engine. It sends commands, which run between two steps. The thread passes the
updates of a whole batch to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

import torch

from quire.engine.engine import Engine
from quire.engine.runner.lent_processors import LentProcessors
from quire.engine.runner.step_watch import TICK_SECONDS, StepWatch
from quire.engine.sequences.schedule import Schedule
from quire.engine.sequences.sequence import Sequence, SequenceUpdate

T = TypeVar("T")
Receive = Callable[[SequenceUpdate | Exception], None]
"""Receives the updates of a request, or the error that ends it.

It is called in the event loop and must not raise.
"""
logger = logging.getLogger(__name__)

REST_SECONDS = 0.02
"""Seconds after which the thread decides again whether to rest or to step."""
JOIN_SECONDS = 5.0
"""How many seconds ``stop`` waits for the current step to end."""


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended; no request can be served any more."""


class EngineFailedError(EngineStoppedError):
    """The engine has failed while the request was in it."""


class EngineThread:
    """The thread that owns an engine.

    Args:
        engine: the engine; after ``start`` only this thread may use it.
        on_step: called in the engine's thread after each step, for metrics, with the engine and the number of
            sequences in the step.
        on_failure: called in the event loop, once, if the engine fails or is stuck.
        on_stall: called in the event loop when the engine stalls (True) and when it recovers (False).
        watch: detects whether the thread is stuck; None disables this check.
        processors: those of the workers of this machine, for steps with more threads while others are idle.
        rests: whether to rest for workers that use the same processors, as ``engine.rests`` says.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[Engine, int], None] | None = None,
        on_failure: Callable[[EngineStoppedError], None] | None = None,
        on_stall: Callable[[bool], None] | None = None,
        watch: StepWatch | None = None,
        processors: LentProcessors | None = None,
        *,
        rests: bool = False,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._watch = watch or StepWatch(math.inf)
        self._processors = processors
        self._rests = rests
        self._commands: deque[Callable[[], None]] = deque()
        self._unfinished: set[Future[Any]] = set()
        """Futures of commands that are queued, that run, or that wait for their callback."""
        self._wake = threading.Condition()
        self._is_stopping = False
        self._has_failed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receivers: dict[str, Receive] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        engine.subscribe_to_disk_reads(self._apply_disk_reads)
        engine.subscribe_to_schedules(self._plan)

    def _apply_disk_reads(self) -> None:
        """Let the engine apply finished disk reads; called from the disk cache's threads."""
        with suppress(EngineStoppedError):
            self.post(lambda engine: engine.apply_disk_results())

    def start(self) -> None:
        """Start the thread; updates go to the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> bool:
        """End the thread after its current step; return False if the step does not end in time."""
        self._refuse_commands()
        await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        return not self._thread.is_alive()

    def _refuse_commands(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    # --- whether the thread is stuck ----------------------------------------------------------------------

    @property
    def is_stalled(self) -> bool:
        """Whether the current step takes far longer than steps usually do."""
        return self._watch.is_stalled

    async def watch(self) -> None:
        """Observe the thread until it is stuck. Then fail all commands and subscribed requests."""
        was_stalled = False
        while not self._watch.is_stuck:
            await asyncio.sleep(TICK_SECONDS)
            self._watch.observe()
            if self.is_stalled != was_stalled:
                was_stalled = not was_stalled
                if self._on_stall is not None:
                    self._on_stall(was_stalled)
        seconds = self._watch.stalled_seconds
        logger.error("engine_stuck", extra={"fields": {"seconds": round(seconds, 1)}})
        self.give_up(EngineFailedError(f"the engine is stuck: its step has taken {seconds:.0f} s"))

    def give_up(self, failure: EngineFailedError) -> None:
        """Fail all commands and subscribed requests, and let the thread end after its current step."""
        self._refuse_commands()
        self._fail_commands(failure)
        self._deliver_failure(failure)

    # --- from the event loop ------------------------------------------------------------------------------

    def check(self, prompt: Sequence) -> None:
        """Raise an error for a request that can never run here, without waiting for the present step.

        Raises:
            RequestTooLongError: the request can never fit.
            KvBudgetError: its KV budget cannot be kept.
        """
        # These checks read only limits, which never change.
        self._engine.requests.checks.check(prompt)

    async def call(self, command: Callable[[Engine], T]) -> T:
        """Run a command on the engine between two steps and return its result.

        If the caller is cancelled first, the command may or may not have run: follow up with an abort.

        Raises:
            EngineStoppedError: the thread has ended.
        """
        return await asyncio.wrap_future(self.post(command))

    async def call_back(self, command: Callable[[Engine, Callable[[T], None]], object]) -> T:
        """Run a command that gets a callback; return the value that it passes to the callback.

        The command may call back immediately or after later steps.

        Raises:
            EngineStoppedError: the thread has ended, or ends before the command calls back.
        """
        return await asyncio.wrap_future(self._post(command))

    async def call_when_read(
        self, block_hashes: Callable[[Engine], Items[bytes]], command: Callable[[Engine], T]
    ) -> T:
        """Run a command as ``call`` does, once a chain's blocks on disk are in host memory or do not fit.

        Raises:
            EngineStoppedError: the thread has ended.
        """

        def read(engine: Engine, resolve: Callable[[tuple[T] | None], None]) -> None:
            # If nothing has to be read, the command need not wait for another step.
            if engine.prefetch(block_hashes(engine), lambda: resolve(None)):
                resolve((command(engine),))

        result = await self.call_back(read)
        return await self.call(command) if result is None else result[0]

    def post(self, command: Callable[[Engine], T]) -> Future[T]:
        """Queue a command without waiting for it; see ``call``."""
        return self._post(lambda engine, resolve: resolve(command(engine)))

    def _post(self, command: Callable[[Engine, Callable[[T], None]], object]) -> Future[T]:
        future: Future[T] = Future()

        def resolve(value: T) -> None:
            with suppress(InvalidStateError):  # ``watch`` found the thread stuck and failed the future
                future.set_result(value)

        def run() -> None:
            # From here on the caller can no longer cancel the command.
            if future.done() or not future.set_running_or_notify_cancel():
                return
            try:
                command(self._engine, resolve)
            except Exception as error:
                with suppress(InvalidStateError):
                    future.set_exception(error)

        with self._wake:
            if self._is_stopping:
                raise _stopped()
            self._commands.append(run)
            self._unfinished.add(future)
            self._wake.notify()
        future.add_done_callback(self._unfinished.discard)
        return future

    def subscribe(self, attempt_id: str, receive: Receive) -> None:
        """Call ``receive`` with each update of the request. An exception is always the last value."""
        self._receivers[attempt_id] = receive

    def is_subscribed(self, attempt_id: str) -> bool:
        """Return whether anything is subscribed to the request's updates."""
        return attempt_id in self._receivers

    def unsubscribe(self, attempt_id: str) -> None:
        """Deliver no more updates of the request; do nothing if nothing is subscribed to them."""
        self._receivers.pop(attempt_id, None)

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            receive = self._receivers.get(update.sequence.attempt_id)
            if receive is not None:
                receive(update)

    def _deliver_failure(self, error: EngineFailedError) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        for receive in list(self._receivers.values()):
            receive(error)
        if self._on_failure is not None:
            self._on_failure(error)

    def _fail_commands(self, error: EngineStoppedError) -> None:
        for future in list(self._unfinished):
            with suppress(InvalidStateError):  # the command has just ended, or was cancelled
                future.set_exception(error)

    # --- in the engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._loop is not None
        can_step = False
        failure: EngineFailedError | None = None
        try:
            while self._run_commands(can_step):
                if clients := self._clients_to_rest_for():
                    self._rest_for(clients)
                    can_step = True
                    continue
                self._watch.begin()
                with self._engine.rests.step():
                    updates = self._step()
                self._watch.end_step()
                # Only a command can let a blocked engine go on: blocks arrive, or a request ends.
                can_step = not self._engine.is_blocked
                if updates:
                    self._loop.call_soon_threadsafe(self._deliver, updates)
                if self._engine.num_stepped and self._on_step:
                    self._on_step(self._engine, self._engine.num_stepped)
        except Exception as error:
            # After a failed step the block tables may be inconsistent: fail all requests and serve no more.
            logger.exception("the engine failed and stops")
            with self._wake:
                self._is_stopping = True
            failure = EngineFailedError(f"the engine has failed: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self._deliver_failure, failure)
        self._fail_commands(failure or _stopped())

    def _step(self) -> list[SequenceUpdate]:
        if self._processors is None:
            return self._engine.step()
        with self._processors.borrowed() as num_threads:
            torch.set_num_threads(num_threads)
            return self._engine.step()

    def _clients_to_rest_for(self) -> Collection[str]:
        """Return the clients whose prompts another worker computes better while this one rests."""
        clients = self._engine.rests.clients() if self._rests else ()
        if clients and self._processors is not None and not self._processors.are_wanted():
            return ()
        return clients

    def _rest_for(self, clients: Collection[str]) -> None:
        """Leave the processors for a moment to the workers that compute the prompts of some clients."""
        with self._wake, self._engine.rests.rest_for(clients):
            if not (self._commands or self._is_stopping):
                self._rest(REST_SECONDS)

    def _rest(self, seconds: float | None = None) -> None:
        """Wait for a command, at most some seconds; the condition is held."""
        self._watch.rest()
        if self._processors is not None:
            self._processors.vacate()
        self._wake.wait(seconds)
        if self._processors is not None:
            self._processors.occupy()

    def _run_commands(self, can_step: bool) -> bool:
        """Run queued commands, and wait for one while no step is possible; return False to end the loop."""
        while True:
            with self._wake:
                while not (self._commands or self._is_stopping or (can_step and not self._engine.is_idle)):
                    self._rest()
                if self._is_stopping:
                    return False
                commands, self._commands = self._commands, deque()
            for command in commands:
                self._watch.begin()
                command()
            self._engine.transfers.grant_blocks()
            if not self._engine.is_idle:
                return True

    def _plan(self, schedule: Schedule) -> None:
        # A step that swaps blocks takes longer than its tokens account for.
        if not (schedule.num_swapped_blocks or schedule.promotions):
            self._watch.plan(schedule.kind)


def _stopped() -> EngineStoppedError:
    return EngineStoppedError("the engine has stopped")
