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
_NO_SPACE = re.compile(r"\S")
_SCALAR = re.compile(r"[\w+\-.]*")
_OPENING, _CLOSING = "{[(", "}])"


class BrokenError(Exception):
    """The text is not what the reader expected."""


class EndedError(Exception):
    """The text has ended before the reader."""


def without_marks(text: str) -> str:
    """Return a text as the model wrote it."""
    return text.replace(TOKEN_MARK, "")


class Cursor:
    """A position in a text that grows at its end; ``tokens`` are the delimiters that are one token."""

    def __init__(self, tokens: frozenset[str] = frozenset()) -> None:
        self.text = ""
        self.at = 0
        self.has_ended = False
        self._tokens = tokens

    def words(self, delimiter: str) -> tuple[str, ...]:
        """Return the parts of a delimiter that whitespace may stand between, with the marks of tokens."""
        return _words(delimiter, self._tokens)

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

    def is_next(self, *words: str) -> Reading[bool]:
        """Return whether one of some words follows."""
        at = self.at
        for word in words:
            if (yield from self.skip((word,))):
                self.at = at
                return True
        return False

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
            yield from self._skip_space()
            name = match[0] if (match := pattern.match(self.text, self.at)) else ""
            if not 0 < len(name) <= LONGEST_NAME:
                raise BrokenError
            if self.at + len(name) < len(self.text):
                self.at += len(name)
                return name
            yield from self.more()

    def search(self, *texts: str) -> Reading[str]:
        """Move to the first of some texts, and return it."""
        pattern, start = re.compile("|".join(map(re.escape, texts))), self.at
        while not (match := pattern.search(self.text, start)):
            start = max(start, len(self.text) - max(map(len, texts)) + 1)
            yield from self.more()
        self.at = match.start()
        return match[0]

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
            on_progress: called before each wait and error; cuts off the text before the cursor. The result is
                then only the text after the last cut.

        Raises:
            BrokenError: there is no such text.
        """
        yield from self._skip_space()
        if self.text[self.at] not in f"{_OPENING}{quotes}":
            return (yield from self.read(_SCALAR))
        start, depth, quote = self.at, 0, ""
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
                if on_progress:
                    on_progress()
                raise BrokenError
            self.at += 1
            if not depth and not quote:
                return self.text[start : self.at]

    def _skip_space(self) -> Reading[None]:
        """Move to the next character that is not whitespace."""
        while not (match := _NO_SPACE.search(self.text, self.at)):
            self.at = len(self.text)
            yield from self.more()
        self.at = match.start()


@lru_cache(maxsize=4096)
def _words(delimiter: str, tokens: frozenset[str]) -> tuple[str, ...]:
    longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    marked = re.sub(longest_first, rf"{TOKEN_MARK}\g<0>", delimiter) if tokens else delimiter
    return tuple(_WORD.findall(marked))
