"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Fed(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, if one did."""

    text: str
    stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended."""
        return self.stop is not None


class StopMatcher:
    """Passes text on up to the stop string that is complete first, whatever the pieces.

    Text that could be the beginning of a stop string is held back until it is decided. Where two stop
    strings are complete at the same character, the longer one counts.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""

    def feed(self, text: str) -> Fed:
        """Take the next piece; after a stop nothing more may be fed."""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            _, at, stop = min(found)
            return Fed(text[:at], stop)
        num_held = max((_longest_beginning(stop, text) for stop in self._stop_strings), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return Fed(text[:cut])

    def flush(self) -> str:
        """Return what is held back: no more text comes, so it begins no stop string."""
        held, self._held = self._held, ""
        return held


def _longest_beginning(stop: str, text: str) -> int:
    """Return the length of the longest end of ``text`` that begins, but does not complete, ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
