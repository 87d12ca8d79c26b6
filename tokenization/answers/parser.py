"""Divides an answer into reasoning, content and tool calls while its tokens arrive."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

from quire.tokenization.answers.calls import CallReader
from quire.tokenization.answers.cursor import (
    LONGEST_NAME,
    TOKEN_MARK,
    BrokenError,
    Cursor,
    EndedError,
    Reading,
    without_marks,
    words_of,
)
from quire.tokenization.answers.formats import AnswerFormat, CallFormat, Channels, Delimiters
from quire.tokenization.answers.pieces import Kind, Piece
from quire.tokenization.answers.writer import PieceWriter


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
        schemas: Mapping[str, Mapping[str, Any]],
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
        self._format = _with_token_marks(answer_format)
        self._tokens = tuple(sorted(answer_format.tokens, key=len, reverse=True))
        self._cursor = Cursor()
        self._writer = PieceWriter(self._cursor, stop_strings, min_tokens, max_calls)
        self._calls: CallReader | None = None
        if self._format.calls and schemas:
            self._calls = CallReader(
                self._format.calls, self._cursor, self._writer, schemas, streams_arguments=streams_arguments
            )
        tail, reasoning, channels = prompt_tail.rstrip(), answer_format.reasoning, answer_format.channels
        if reasoning:
            opened = tail.endswith(reasoning.open.strip())
            self._writer.has_delimiter = opened or tail.endswith(reasoning.close.strip())
            self._writer.kind = Kind.REASONING if opened else Kind.CONTENT
        call_markers = self._calls.markers if self._calls else ()
        self._markers = {
            kind: _markers(self._format, kind, call_markers) for kind in (Kind.CONTENT, Kind.REASONING)
        }
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
        if self.stop is not None:
            return []
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
            yield from self._read_region(self._read_header(), 0)
        while True:
            marker, length = yield from self._read_text()
            yield from self._read_region(self._region(marker, length), length)

    def _read_text(self) -> Reading[tuple[_Marker, int]]:
        """Show text up to the next marker, and return that with its length."""
        cursor = self._cursor
        while True:
            if self._calls and self._awaits_first_content():
                first = cursor.text.lstrip()[:1]
                if not first:
                    yield from cursor.more()
                    continue
                if first == self._calls.first_character:
                    return _Marker.CALL, 0
            pattern, markers = self._markers[self._writer.kind]
            match = pattern.search(cursor.text)
            cursor.at = match.start() if match else len(cursor.text)
            if cursor.at:
                self._writer.write_text()
            if match and match[0] in markers:
                return markers[match[0]], len(match[0])
            yield from cursor.more()

    def _awaits_first_content(self) -> bool:
        """Return whether a call without a marker may follow."""
        calls, writer = self._format.calls, self._writer
        assert calls
        return calls.may_begin_answer and writer.kind is Kind.CONTENT and Kind.CONTENT not in writer.begun

    def _read_region(self, reading: Reading[None], length: int) -> Reading[None]:
        """Read what a marker opens; if it is something else, the text up to there is ordinary text."""
        start = self._writer.start
        try:
            yield from reading
        except BrokenError:
            if self._writer.start == start:
                self._cursor.at = max(self._cursor.at, length)
            self._writer.write_text()
        if self._calls:
            self._calls.is_open = False

    def _region(self, marker: _Marker, length: int) -> Reading[None]:
        reasoning, writer = self._format.reasoning, self._writer
        match marker:
            case _Marker.OPEN if reasoning:
                yield from self._cursor.expect(words_of(reasoning.open))
                writer.write_delimiter(Kind.REASONING)
                writer.kind = Kind.REASONING
            case _Marker.CLOSE if reasoning:
                yield from self._cursor.expect(words_of(reasoning.close))
                writer.write_delimiter(Kind.REASONING)
                writer.kind = Kind.CONTENT
            case _Marker.HEADER:
                yield from self._read_header()
            case _Marker.END:
                self._cursor.at = length
                writer.write_delimiter(writer.kind)
                writer.kind = Kind.CONTENT
            case _Marker.CALL if self._calls:
                yield from self._calls.read_section()

    def _read_header(self) -> Reading[None]:
        """Read a header of harmony, and the call after it."""
        channels, cursor, writer = self._format.channels, self._cursor, self._writer
        assert channels
        longest = LONGEST_NAME + len(channels.header_end)
        while (end := cursor.text.find(channels.header_end, 0, longest)) < 0:
            if len(cursor.text) >= longest:
                raise BrokenError
            yield from cursor.more()
        header = without_marks(cursor.text[:end])
        cursor.at = end + len(channels.header_end)
        recipient = re.search(rf"{re.escape(channels.recipient)}\s*([\w.\-]+)", header)
        if recipient and self._calls and (name := self._calls.called_name(recipient[1])):
            yield from self._calls.read_arguments(name)
            return
        kind = Kind.REASONING if channels.reasoning_channel in header else Kind.CONTENT
        writer.write_delimiter(kind)
        writer.kind = kind


class _Marker(Enum):
    """What begins where a text ends."""

    OPEN = auto()
    CLOSE = auto()
    CALL = auto()
    HEADER = auto()
    END = auto()


class _Markers(NamedTuple):
    pattern: re.Pattern[str]
    """Finds the next marker, or the beginning of one at the end of the text."""
    markers: Mapping[str, _Marker]


@lru_cache(maxsize=64)
def _markers(answer_format: AnswerFormat, kind: Kind, call_markers: Sequence[str]) -> _Markers:
    """Return what may end a text of a kind."""
    reasoning, channels = answer_format.reasoning, answer_format.channels
    markers: dict[str, _Marker] = {}
    if channels:
        markers |= dict.fromkeys(channels.starts, _Marker.HEADER) | dict.fromkeys(channels.ends, _Marker.END)
    if kind is Kind.CONTENT or (answer_format.calls and answer_format.calls.ends_reasoning):
        markers |= dict.fromkeys(call_markers, _Marker.CALL)
    if reasoning:
        is_reasoning = kind is Kind.REASONING
        text = reasoning.close if is_reasoning else reasoning.open
        markers[words_of(text)[0]] = _Marker.CLOSE if is_reasoning else _Marker.OPEN
    begun = (f"{_prefixes(each[:-1])}\\Z" for each in markers)
    return _Markers(re.compile("|".join([*map(re.escape, markers), *begun]) or "(?!)"), markers)


def _prefixes(text: str) -> str:
    """Return a pattern for all prefixes of a text but the empty one."""
    return "(?:".join(map(re.escape, text)) + ")?" * (len(text) - 1)


@lru_cache(maxsize=64)
def _with_token_marks(answer_format: AnswerFormat) -> AnswerFormat:
    """Return the format with a mark before each delimiter that is one token."""
    if not answer_format.tokens:
        return answer_format
    ordered = sorted(answer_format.tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)))

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(rf"{TOKEN_MARK}\g<0>", value)
        if isinstance(value, Delimiters):
            return Delimiters(*map(marked, value))
        if isinstance(value, tuple):
            return tuple(map(marked, value))
        if isinstance(value, (AnswerFormat, CallFormat, Channels)):
            return replace(value, **{each.name: marked(getattr(value, each.name)) for each in fields(value)})
        return value

    result: AnswerFormat = marked(answer_format)
    return result
