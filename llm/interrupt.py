"""Keeps Ctrl-C out of the middle of a step, where it would leave blocks that nobody owns."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold the first Ctrl-C back until the block has ended; a second one comes through at once."""
    previous = signal.getsignal(signal.SIGINT)
    # Python runs handlers in the main thread alone; None is a handler that C code installed.
    if current_thread() is not main_thread() or previous is None:
        yield
        return
    was_pressed = False

    def hold(signal_number: int, frame: FrameType | None) -> None:
        nonlocal was_pressed
        was_pressed = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if was_pressed:
            signal.raise_signal(signal.SIGINT)
