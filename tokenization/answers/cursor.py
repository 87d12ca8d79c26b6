"""Reads a text that arrives in parts: each reader waits until the text shows how to go on."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader yields while it needs more text. Its result does not depend on how the text was divided."""

LONGEST_NAME = 256
"""Most characters of a name, a key or a header; with more, the text is no call."""
TOKEN_MARK = "\ud800"
"""Precedes each delimiter that is one token. No text of a tokenizer contains it."""
_WORD = re.compile(r"M?(?:<[^\s<>]*>?|[^\s<>M]*>|[^\s<>M]+)".replace("M", TOKEN_MARK))
_JSON_PLAIN = re.compile(r"[\s\d,:+\-.eEtrufalsn]*")
_STRINGS = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in ('"', "'")}
_SCALAR = re.compile(r"[\w+\-.]*")
_OPENING, _CLOSING = "{[(", "}])"


class BrokenError(Exception):
    """The text is not what the reader expected."""


class EndedError(Exception):
    """The text has ended before the reader."""


def without_marks(text: str) -> str:
    """Return a text as the model wrote it."""
    return text.replace(TOKEN_MARK, "")


@lru_cache(maxsize=1024)
def words_of(delimiter: str) -> Sequence[str]:
    """Return the parts of a delimiter that whitespace may stand between."""
    return tuple(_WORD.findall(delimiter))


class Cursor:
    """A position in a text that grows at its end."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False

    def more(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            EndedError: no more text will come.
        """
        if self.has_ended:
            raise EndedError
        yield

    def skip(self, words: Sequence[str]) -> Reading[bool]:
        """Skip words with whitespace before each, and return True; or skip nothing if they do not follow."""
        at = self.at
        for word in words:
            while True:
                while at < len(self.text) and self.text[at].isspace():
                    at += 1
                if self.text.startswith(word, at):
                    at += len(word)
                    break
                if not word.startswith(self.text[at:]):
                    return False
                yield from self.more()
        self.at = at
        return True

    def is_next(self, words: Sequence[str]) -> Reading[bool]:
        """Return whether some words follow."""
        at = self.at
        found = yield from self.skip(words)
        self.at = at
        return found

    def expect(self, words: Sequence[str]) -> Reading[None]:
        """Skip some words.

        Raises:
            BrokenError: they do not follow.
        """
        if not (yield from self.skip(words)):
            raise BrokenError

    def read(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Return the longest text of a pattern, without whitespace before it.

        Raises:
            BrokenError: the text is empty or too long.
        """
        while True:
            start = self._after_space()
            end = match.end() if (match := pattern.match(self.text, start)) else start
            if end - start > LONGEST_NAME or (end == start < len(self.text)):
                raise BrokenError
            if end < len(self.text):
                self.at = end
                return self.text[start:end]
            yield from self.more()

    def find(self, text: str, start: int) -> Reading[int]:
        """Return where a text begins, at or after ``start``."""
        while (found := self.text.find(text, start)) < 0:
            start = max(start, len(self.text) - len(text) + 1)
            yield from self.more()
        return found

    def search(self, pattern: re.Pattern[str], longest: int) -> Reading[re.Match[str]]:
        """Return the next match of a pattern that matches at most ``longest`` characters."""
        start = self.at
        while not (match := pattern.search(self.text, start)):
            start = max(start, len(self.text) - longest + 1)
            yield from self.more()
        return match

    def read_brackets(
        self,
        plain: re.Pattern[str] = _JSON_PLAIN,
        quotes: str = '"',
        on_progress: Callable[[], None] | None = None,
    ) -> Reading[str]:
        """Return a text in brackets or quotes, or a single word; by default it is a JSON value.

        Args:
            plain: all that may occur outside of strings, except for brackets and quotes.
            quotes: characters that begin and end strings.
            on_progress: called before each wait, and cuts off the text before the cursor. The result is then
                only the text after the last cut.

        Raises:
            BrokenError: there is no such text.
        """
        while (start := self._after_space()) == len(self.text):
            yield from self.more()
        if self.text[start] not in f"{_OPENING}{quotes}":
            return (yield from self.read(_SCALAR))
        self.at = start
        depth, quote = 0, ""
        while True:
            match = (_STRINGS[quote] if quote else plain).match(self.text, self.at)
            assert match, "the patterns match an empty text"
            self.at = match.end()
            character = self.text[self.at : self.at + 1]
            if not character or (quote and character != quote):
                if on_progress:
                    on_progress()
                    start = 0
                yield from self.more()
                continue
            if quote:
                quote = ""
            elif character in quotes:
                quote = character
            elif character in _OPENING:
                depth += 1
            elif character in _CLOSING and depth:
                depth -= 1
            else:
                raise BrokenError
            self.at += 1
            if not depth and not quote:
                return self.text[start : self.at]

    def _after_space(self) -> int:
        """Return the position of the next character that is not whitespace, or the end."""
        at = self.at
        while at < len(self.text) and self.text[at].isspace():
            at += 1
        return at
