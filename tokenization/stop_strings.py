"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Fed(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, or None."""

    text: str
    stop: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended."""
        return self.stop is not None


class StopMatcher:
    """Passes text on up to the first complete stop string, however the text is split into pieces.

    Text that could be the beginning of a stop string is held back until that is decided. If two stop strings
    end at the same character, the longer one counts.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = tuple(stop_strings)
        self._held = ""
        self._num_begun = [0] * len(self._stop_strings)
        """For each stop string, how many of its first characters the text ends with."""

    def feed(self, text: str) -> Fed:
        """Take the next piece and return the text that may be shown; do not call it after a stop."""
        whole = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop_strings if (at := whole.find(stop)) >= 0]
        if found:
            self._held = ""
            _, at, stop = min(found)
            return Fed(whole[:at], stop)
        for at, stop in enumerate(self._stop_strings):
            self._num_begun[at] = _num_begun(stop, self._num_begun[at], text)
        cut = len(whole) - max(self._num_begun, default=0)
        self._held = whole[cut:]
        return Fed(whole[:cut])

    def flush(self) -> str:
        """Return the text that is held back, at the end of the text, where it cannot begin a stop string."""
        held, self._held = self._held, ""
        return held


def _num_begun(stop: str, num_begun: int, text: str) -> int:
    """Return how many first characters of ``stop`` the text ends with; ``num_begun`` is that before ``text``.

    The algorithm of Knuth, Morris and Pratt reads each character of the text once. Trying all lengths of the
    beginning took up to a quarter of a millisecond for each token.
    """
    borders = _borders(stop)
    if len(text) >= len(stop):
        num_begun, text = 0, text[len(text) - len(stop) + 1 :]
    for character in text:
        while num_begun and stop[num_begun] != character:
            num_begun = borders[num_begun]
        num_begun += stop[num_begun] == character
    return num_begun


@lru_cache(maxsize=1024)
def _borders(stop: str) -> Sequence[int]:
    """Return, for each prefix length, the length of its longest proper prefix that is also its suffix."""
    borders, length = [0, 0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return borders
