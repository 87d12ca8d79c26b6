"""Divides an answer into reasoning, content and tool calls while its tokens arrive."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial

from quire.tokenization.answers.calls import CallReader, Schemas
from quire.tokenization.answers.cursor import (
    LONGEST_NAME,
    TOKEN_MARK,
    BrokenError,
    Cursor,
    EndedError,
    Reading,
    without_marks,
)
from quire.tokenization.answers.formats import AnswerFormat
from quire.tokenization.answers.pieces import Kind, Piece
from quire.tokenization.answers.writer import PieceWriter

_Reader = Callable[[], Reading[None]]


class AnswerParser:
    """Divides one answer into pieces, which do not depend on how its text is divided into tokens.

    All text outside of delimiters and calls is in the pieces. A call that is not well formed, or that the end
    of the answer cuts off, is content, with its delimiters, unless a part of it was already returned.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        prompt_tail: str,
        schemas: Schemas,
        stop_strings: Sequence[str] = (),
        min_tokens: int = 0,
        streams_arguments: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            answer_format: how the model writes.
            prompt_tail: the end of the prompt, which may have opened or closed the reasoning.
            schemas: for each tool, the JSON schema of its parameters; without tools, calls are content.
            stop_strings: texts that end the answer when they occur in content.
            min_tokens: number of tokens at the beginning whose text contains no stop strings.
            streams_arguments: return arguments in parts. A grammar must ensure that each call is well formed;
                without one, a call is returned when it is complete.
            max_calls: number of calls that are returned; the others are left out.
        """
        self._tokens = tuple(sorted(answer_format.tokens, key=len, reverse=True))
        self._cursor = cursor = Cursor(answer_format.tokens)
        self._writer = PieceWriter(cursor, stop_strings, min_tokens, max_calls)
        self._channels = channels = answer_format.channels
        self._calls: CallReader | None = None
        # For each kind, what reads on after a word that ends a text of it.
        self._readers: dict[Kind, dict[str, _Reader]] = {Kind.CONTENT: {}, Kind.REASONING: {}}
        in_content, in_reasoning = self._readers.values()
        if answer_format.calls and schemas:
            self._calls = CallReader(answer_format.calls, cursor, self._writer, schemas, streams_arguments)
            for readers in self._readers.values() if answer_format.calls.ends_reasoning else [in_content]:
                readers |= dict.fromkeys(self._calls.markers, self._calls.read_section)
        tail = prompt_tail.rstrip()
        if answer_format.reasoning:
            opened, closed = answer_format.reasoning
            in_content[cursor.words(opened)[0]] = partial(self._change_kind, opened, Kind.REASONING)
            in_reasoning[cursor.words(closed)[0]] = partial(self._change_kind, closed, Kind.CONTENT)
            self._writer.has_delimiter = tail.endswith((opened.strip(), closed.strip()))
            if tail.endswith(opened.strip()):
                self._writer.kind = Kind.REASONING
        if channels:
            for readers in self._readers.values():
                readers |= {cursor.words(each)[0]: self._read_header for each in channels.starts}
                readers |= {
                    cursor.words(each)[0]: partial(self._change_kind, each, Kind.CONTENT)
                    for each in channels.ends
                }
        self._patterns = {kind: _pattern_of(tuple(words)) for kind, words in self._readers.items()}
        # What an ordinary token must not contain; all delimiters that are one token are among it.
        self._marked = {kind: _pattern_of((*words, *self._tokens)) for kind, words in self._readers.items()}
        self._in_text: re.Pattern[str] | None = None
        """Finds what may end the present text; None: the next text may begin a part."""
        self._begins_in_header = channels is not None and tail.endswith(channels.prompt_end)
        self._steps = self._run()

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._writer.stop

    def feed(self, token_text: str, *, is_special: bool = False) -> list[Piece]:
        """Return the pieces that the next token completes.

        ``is_special`` hides a special token, if it is no delimiter of the format.
        """
        return self.feed_all([(token_text, is_special)])

    def feed_text(self, text: str, num_tokens: int, special: str = "") -> Piece | None:
        """Return the piece of some tokens if they only continue the present part.

        None: nothing was fed, since the text may contain a delimiter; ``feed_all`` then takes each token.
        There must be no stop strings.

        Args:
            text: that of the tokens that are not special.
            special: that of the others, which is hidden if none of them is a delimiter.
        """
        pattern = self._in_text
        if pattern is None or pattern.search(text) or (special and pattern.search(special)):
            return None
        return self._writer.write_whole(text, num_tokens)

    def feed_all(self, tokens: Iterable[tuple[str, bool]]) -> list[Piece]:
        """Return the pieces that several tokens complete, each with its text and whether it is special.

        A stop string does not say which of the tokens ends it.
        """
        if self.stop is not None:
            return []
        for token_text, is_special in tokens:
            if token_text.endswith(self._tokens):
                token = next(each for each in self._tokens if token_text.endswith(each))
                token_text = f"{token_text.removesuffix(token)}{TOKEN_MARK}{token}"
            elif is_special:
                token_text = ""
            self._writer.add_token(token_text)
        next(self._steps, None)
        return self._writer.take()

    def finish(self) -> list[Piece]:
        """Return the rest at the end of the answer, also where it was cut off."""
        self._cursor.has_ended = True
        next(self._steps, None)
        return self._writer.take()

    def _run(self) -> Reading[None]:
        """Divide the answer, up to its end or a stop string."""
        with suppress(EndedError):
            yield from self._divide()
        with suppress(EndedError):
            self._cursor.at = len(self._cursor.text)
            if self._calls and self._calls.is_open:
                self._writer.write_delimiter(Kind.CALL)
            elif self.stop is None:
                self._writer.write_text()
        self._writer.finish()

    def _divide(self) -> Reading[None]:
        if self._begins_in_header:
            yield from self._read_region(self._read_header, 0)
        while True:
            read, length = yield from self._read_text()
            yield from self._read_region(read, length)

    def _read_text(self) -> Reading[tuple[_Reader, int]]:
        """Show text up to a word that ends it, and return what reads on, and the word's length."""
        cursor, writer = self._cursor, self._writer
        first_word = self._calls.first_word if self._calls else ""
        while True:
            if first_word and writer.kind is Kind.CONTENT and Kind.CONTENT not in writer.begun:
                if not cursor.text.strip():
                    yield from cursor.more()
                    continue
                if self._calls and cursor.text.lstrip().startswith(first_word):
                    return self._calls.read_section, 0
            readers = self._readers[writer.kind]
            match = self._patterns[writer.kind].search(cursor.text)
            cursor.at = match.start() if match else len(cursor.text)
            if cursor.at:
                writer.write_text()
            if match and match[0] in readers:
                self._in_text = None
                return readers[match[0]], len(match[0])
            self._in_text = self._marked[writer.kind] if writer.continues and not cursor.text else None
            yield from cursor.more()

    def _read_region(self, read: _Reader, length: int) -> Reading[None]:
        """Read what a word opens; if it is something else, the text up to there is ordinary text."""
        start = self._writer.start
        try:
            yield from read()
        except BrokenError:
            if self._writer.start == start:
                self._cursor.at = max(self._cursor.at, length)
            self._writer.write_text()
        if self._calls:
            self._calls.is_open = False

    def _change_kind(self, delimiter: str, kind: Kind) -> Reading[None]:
        """Skip a delimiter, after which the text is of another kind."""
        yield from self._cursor.expect(self._cursor.words(delimiter))
        self._writer.write_delimiter(Kind.REASONING if kind is Kind.REASONING else self._writer.kind)
        self._writer.kind = kind

    def _read_header(self) -> Reading[None]:
        """Read a header of harmony, and the call after it."""
        channels, cursor = self._channels, self._cursor
        assert channels
        (header_end,) = cursor.words(channels.header_end)
        longest = LONGEST_NAME + len(header_end)
        while (end := cursor.text.find(header_end, 0, longest)) < 0:
            if len(cursor.text) >= longest:
                raise BrokenError
            yield from cursor.more()
        header = without_marks(cursor.text[:end])
        cursor.at = end + len(header_end)
        recipient = re.search(rf"{re.escape(channels.recipient)}\s*([\w.\-]+)", header)
        if recipient and self._calls and (name := self._calls.called_name(recipient[1])):
            yield from self._calls.read_arguments(name)
            return
        kind = Kind.REASONING if channels.reasoning_channel in header else Kind.CONTENT
        self._writer.write_delimiter(kind)
        self._writer.kind = kind


@lru_cache(maxsize=256)
def _pattern_of(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds the first of some words, or the beginning of one at the end of the text."""
    begun = ("(?:".join(map(re.escape, word[:-1])) + ")?" * (len(word) - 2) + r"\Z" for word in words)
    return re.compile("|".join([*map(re.escape, words), *begun]) or "(?!)")
