"""Runs the requests of one call together: with a progress bar, and so that Ctrl-C ends all of them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from time import perf_counter
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quire.engine.engine import Engine
from quire.engine.errors import KvBudgetError, RequestTooLongError
from quire.llm.request import Request

Advance = Callable[[int, int], None]
"""Is called with the number of requests that ended and of tokens generated since the last call."""


def run_batch(engine: Engine, requests: Sequence[Request], shows_progress: bool) -> None:
    """Run requests until each has ended; free their blocks even if the caller interrupts this.

    Raises:
        ValueError: a request can never be served.
    """
    by_id = {request.sequence.attempt_id: request for request in requests}
    try:
        with uninterrupted():
            _add(engine, requests)
        with _progress_bar(len(requests), shows_progress) as advance:
            while not engine.is_idle:
                with uninterrupted() as was_pressed:
                    while not (engine.is_idle or was_pressed()):
                        _step(engine, by_id, advance)
    finally:
        with uninterrupted():
            for attempt_id in by_id:
                engine.abort(attempt_id)


def _add(engine: Engine, requests: Sequence[Request]) -> None:
    for at, request in enumerate(requests):
        try:
            engine.add_request(request.sequence)
        except KvBudgetError as error:
            raise ValueError(f"sampling_params[{at}].kv_budget_tokens {error}") from error
        except RequestTooLongError as error:
            raise ValueError(f"prompts[{at}]: {error}") from error


def _step(engine: Engine, by_id: Mapping[str, Request], advance: Advance) -> None:
    num_running = len(engine.groups)
    updates = engine.step()
    for update in updates:
        if by_id[update.sequence.attempt_id].add(update):
            engine.stop_sequence(update.sequence)
    num_ended = num_running - len(engine.groups)
    advance(num_ended, sum(len(update.tokens) for update in updates))


@contextmanager
def uninterrupted() -> Iterator[Callable[[], bool]]:
    """Delay the first Ctrl-C until the context ends; a second one interrupts at once.

    In the middle of a step, an interrupt would leak blocks. The context yields a function that tells whether
    Ctrl-C was pressed.
    """
    previous = signal.getsignal(signal.SIGINT)
    # Python runs handlers only in the main thread; None means that C code installed the handler.
    if current_thread() is not main_thread() or previous is None:
        yield lambda: False
        return
    was_pressed = False

    def note_press(signal_number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        was_pressed = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, note_press)
    try:
        yield lambda: was_pressed
    finally:
        signal.signal(signal.SIGINT, previous)
        if was_pressed:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _progress_bar(num_requests: int, is_shown: bool) -> Iterator[Advance]:
    """Show a progress bar on stderr inside the context, and yield the function that advances it."""
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as progress:
        task = progress.add_task("", total=num_requests, rate=0.0)
        start, num_tokens = perf_counter(), 0

        def advance(num_ended: int, num_new_tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += num_new_tokens
            progress.update(task, advance=num_ended, rate=num_tokens / (perf_counter() - start))

        yield advance
