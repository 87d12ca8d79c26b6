"""Delays Ctrl-C until the end of a step; in the middle of one it would leak blocks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay the first Ctrl-C until the context ends; a second one interrupts at once."""
    previous = signal.getsignal(signal.SIGINT)
    # Python runs handlers only in the main thread; None means that C code installed the handler.
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
