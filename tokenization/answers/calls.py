"""Reads the calls of an answer by the format that its model writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.tokenization.answers.arguments import (
    json_object,
    json_of_key_values,
    json_value,
    parameter_types,
    python_calls,
)
from quire.tokenization.answers.cursor import (
    TOKEN_MARK,
    BrokenError,
    Cursor,
    Reading,
    without_marks,
)
from quire.tokenization.answers.formats import CallFormat, CallSyntax
from quire.tokenization.answers.pieces import Kind
from quire.tokenization.answers.writer import PieceWriter

_NAME = re.compile(rf"[^\s<>{{}}()\[\]\"',{TOKEN_MARK}]+")
_KEY = re.compile(rf"[^<>\"{TOKEN_MARK}]+")
_PYTHON_PLAIN = re.compile(r"""[^\[\](){}"']*""")
_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", "id", "type", *_ARGUMENT_KEYS)


Schemas = Mapping[str, Mapping[str, Any]]
"""For each tool, the JSON schema of its parameters."""


@dataclass(eq=False)
class CallReader:
    """Reads calls at a cursor; its readers raise BrokenError where the text is no call."""

    calls: CallFormat
    cursor: Cursor
    writer: PieceWriter
    schemas: Schemas
    streams_arguments: bool

    def __post_init__(self) -> None:
        calls, cursor = self.calls, self.cursor
        self.is_open = False
        """Whether a part of the last call is written, and more of it or what closes it would follow."""
        section, opened = cursor.words(calls.section_open), cursor.words(calls.open)
        self.markers = {words[0] for words in (section, opened) if words}
        """The words that can begin a section."""
        # A JSON call is recognised by its brace, too.
        brace = ("{",) if calls.syntax is CallSyntax.JSON_CALL else ()
        self._opening: tuple[str, ...] = (*opened, *brace)
        self.first_word = (*section[1:], *self._opening)[0] if calls.may_begin_answer else ""
        """What begins a section at the beginning of the content, without a marker."""
        self._ends = (*cursor.words(calls.close)[:1], *cursor.words(calls.section_close)[:1])
        self._name = self._call_id = self._arguments = ""

    def called_name(self, recipient: str) -> str | None:
        """Return the name of the tool that a harmony message is for, or None if it is for none."""
        name = recipient.removeprefix(self.calls.name_prefix)
        return name if name != recipient or name in self.schemas else None

    def read_section(self) -> Reading[None]:
        """Read a section, or a single call."""
        calls, cursor = self.calls, self.cursor
        section = cursor.words(calls.section_open)
        if not (yield from cursor.skip(section)) and calls.may_begin_answer:
            yield from cursor.expect(section[1:])
        if calls.syntax is CallSyntax.PYTHON:
            yield from self._read_python()
        else:
            yield from cursor.expect(self._opening)
            yield from self._read_call()
            if section or cursor.words(calls.separator):
                while (yield from cursor.skip((*cursor.words(calls.separator), *self._opening))):
                    yield from self._read_call()
        for word in cursor.words(calls.section_close):
            yield from cursor.skip((word,))
        self.writer.write_delimiter(Kind.CALL)

    def read_arguments(self, name: str, call_id: str = "") -> Reading[None]:
        """Read the arguments of a call, and what closes it."""
        self._begin(name, call_id)
        match self.calls.syntax:
            case CallSyntax.PARAMETERS:
                yield from self._read_parameters()
            case CallSyntax.KEY_VALUES:
                yield from self._read_key_values()
            case _:
                yield from self._read_json()
        yield from self._end()

    def _read_call(self) -> Reading[None]:
        calls, cursor = self.calls, self.cursor
        self.is_open = False
        if calls.syntax is CallSyntax.JSON_CALL:
            yield from self._read_json_call()
            return
        header = name = without_marks((yield from cursor.read(_NAME)))
        call_id = ""
        if calls.id_open and (yield from cursor.skip(cursor.words(calls.id_open))):
            call_id = yield from cursor.read(_NAME)
        elif calls.index_open:
            call_id = header
            name = header.rpartition(calls.index_open)[0] or header
        yield from cursor.skip(cursor.words(calls.name_end))
        yield from self.read_arguments(name.removeprefix(calls.name_prefix), call_id)

    def _begin(self, name: str, call_id: str = "") -> None:
        """Begin a call, which goes out whole or in parts."""
        if not name or (self.calls.may_begin_answer and name not in self.schemas):
            raise BrokenError
        self._name, self._call_id, self._arguments = name, call_id, ""
        if self.streams_arguments:
            self.is_open = True
            self.writer.write_call("", name, call_id)

    def _add(self, arguments: str) -> None:
        if self.streams_arguments:
            self.writer.write_call(without_marks(arguments))
        else:
            self._arguments += without_marks(arguments)

    def _end(self) -> Reading[None]:
        """End a call whose arguments are complete; what closes it may be absent."""
        if not self.streams_arguments:
            arguments = json_object(self._arguments)
            if arguments is None:
                raise BrokenError
            self.writer.write_call(arguments, self._name, self._call_id)
            self.is_open = True
        for word in self.cursor.words(self.calls.close):
            yield from self.cursor.skip((word,))
        self.writer.write_delimiter(Kind.CALL)

    def _read_json(self) -> Reading[None]:
        """Read the JSON object of the arguments, whose parts go out at once if arguments are streamed."""
        cursor = self.cursor
        yield from cursor.expect(("{",))
        cursor.at -= 1
        if not self.streams_arguments:
            self._add((yield from cursor.read_brackets()))
            return
        self._add("")
        self._add((yield from cursor.read_brackets(on_progress=lambda: self._add(cursor.text[: cursor.at]))))

    def _read_json_call(self) -> Reading[None]:
        """Read the rest of an object that has name and arguments, in any order."""
        cursor = self.cursor
        name, arguments = "", "{}"
        while not (yield from cursor.skip(("}",))):
            key = (yield from cursor.read_brackets()).strip('"')
            if key not in _CALL_KEYS and self.calls.may_begin_answer:
                raise BrokenError
            yield from cursor.expect((":",))
            is_arguments = key in _ARGUMENT_KEYS
            if is_arguments and name and self.streams_arguments and (yield from cursor.is_next("{")):
                self._begin(name)
                yield from self._read_json()
            else:
                value = yield from cursor.read_brackets()
                name = value.strip('"') if key == "name" else name
                arguments = value if is_arguments else arguments
            yield from cursor.skip((",",))
        if not self.is_open:
            self._begin(name)
            self._add(json_object(without_marks(arguments)) or "")
        yield from self._end()

    def _read_parameters(self) -> Reading[None]:
        calls, cursor = self.calls, self.cursor
        before = "{"
        while (yield from cursor.skip(cursor.words(calls.parameter_open))):
            key = (yield from cursor.read(_KEY)).rstrip()
            is_json = yield from cursor.skip(cursor.words(calls.json_key_end))
            if not is_json or not calls.json_key_end:
                yield from cursor.expect(cursor.words(calls.key_end))
            types = parameter_types(self.schemas.get(self._name, {}), key)
            if calls.json_key_end:
                types = set() if is_json else {"string"}
            value = yield from self._read_value()
            self._add(f"{before}{json_value(key, {'string'})}: {json_value(value, types)}")
            before = ", "
        if not (yield from cursor.is_next(*self._ends)):
            raise BrokenError
        self._add("{}" if before == "{" else "}")

    def _read_value(self) -> Reading[str]:
        """Return the raw text of a parameter.

        Values have no escapes: what closes them only counts if another parameter or the call's end follows.
        """
        calls, cursor = self.calls, self.cursor
        closing, *others = cursor.words(calls.value_end)
        start = end = cursor.at
        is_closed = False
        while not is_closed:
            yield from cursor.search(closing)
            end = cursor.at
            cursor.at += len(closing)
            yield from cursor.skip(others)
            is_closed = yield from cursor.is_next(cursor.words(calls.parameter_open)[0], *self._ends)
        value = without_marks(cursor.text[start:end])
        value = value.removeprefix("\n") if calls.key_end.endswith("\n") else value
        return value.removesuffix("\n") if calls.value_end.startswith("\n") else value

    def _read_key_values(self) -> Reading[None]:
        calls, cursor = self.calls, self.cursor
        (delimiter,), (closing, *_) = map(cursor.words, (calls.string_delimiter, calls.close))
        yield from cursor.expect(("{",))
        start, depth, parts = cursor.at - 1, 1, []
        while depth:
            found = yield from cursor.search(delimiter, closing, *"{}[]")
            if found == closing:
                raise BrokenError
            if found == delimiter:
                parts.append((cursor.text[start : cursor.at], False))
                start = cursor.at = cursor.at + len(delimiter)
                yield from cursor.search(delimiter)
                parts.append((cursor.text[start : cursor.at], True))
                start = cursor.at + len(delimiter)
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(found, 0)
            cursor.at += len(found)
        arguments = json_of_key_values([*parts, (cursor.text[start : cursor.at], False)])
        if arguments is None:
            raise BrokenError
        self._add(arguments)

    def _read_python(self) -> Reading[None]:
        """Read a list of calls after its bracket."""
        cursor = self.cursor
        start = cursor.at - 1
        name = yield from cursor.read(_NAME)
        if name not in self.schemas:
            raise BrokenError
        cursor.at = start
        text = yield from cursor.read_brackets(_PYTHON_PLAIN, "\"'")
        calls = python_calls(without_marks(text))
        if not calls or not all(name in self.schemas for name, _ in calls):
            raise BrokenError
        for name, arguments in calls:
            self._begin(name)
            self._add(arguments)
            yield from self._end()
