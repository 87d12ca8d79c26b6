"""Builds the items of an answer from its pieces, and the events that announce each addition."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.answer_bodies import TokenLogprob
from quire.services.router.http.openai.logprobs import TokenNames, chat_logprobs
from quire.services.router.http.openai.responses.answer_bodies import (
    ItemStatus,
    OutputItem,
    OutputPart,
    ResponseEvent,
)
from quire.services.router.http.openai.responses.chat_request import KnownTool
from quire.services.router.http.openai.responses.requests import ResponseCustomTool
from quire.services.router.http.openai.tools import input_of

# What an item consists of, which is also the prefix of its events.
_REASONING, _MESSAGE = "reasoning_text", "output_text"
_ARGUMENTS, _INPUT = "function_call_arguments", "custom_tool_call_input"
_TYPES = {
    _REASONING: ("reasoning", "rs"),
    _MESSAGE: ("message", "msg"),
    _ARGUMENTS: ("function_call", "fc"),
    _INPUT: ("custom_tool_call", "ctc"),
}
"""The type of an item, and the prefix of its id."""


@dataclass
class _OpenItem:
    """The item that the model is writing, and what it has written of it."""

    kind: str
    id: str
    call: pb.ToolCall
    """The first piece of a call."""
    name: str
    namespace: str | None
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def is_call(self) -> bool:
        return self.kind in (_ARGUMENTS, _INPUT)

    @property
    def text_field(self) -> str:
        """Name of the member that has the whole text: ``text``, ``arguments`` or ``input``."""
        return self.kind.rpartition("_")[2]

    def text(self) -> str:
        text = "".join(self.texts)
        return input_of(text) if self.kind == _INPUT else text

    def part(self) -> OutputPart:
        is_message = self.kind == _MESSAGE
        more: dict[str, Any] = {"annotations": [], "logprobs": list(self.logprobs)} if is_message else {}
        return OutputPart.model_validate({"type": self.kind, "text": self.text(), **more})

    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item so far; the content of an item in progress is in events of its own."""
        members: dict[str, Any] = {"id": self.id, "type": _TYPES[self.kind][0], "status": status}
        if self.is_call:
            members |= {"call_id": self.call.id, "name": self.name, self.text_field: self.text()}
            if self.namespace is not None:
                members["namespace"] = self.namespace
        else:
            name, value = ("role", "assistant") if self.kind == _MESSAGE else ("summary", [])
            members |= {name: value, "content": [] if status == "in_progress" else [self.part()]}
        return OutputItem(**members)


class Output:
    """The output of an answer, and the events of its stream.

    Args:
        name: the request's id, from which the ids of the items are made.
        token_names: the names of tokens in logprobs; None: the answer has no logprobs.
    """

    def __init__(self, name: str, tools: Mapping[str, KnownTool], token_names: TokenNames | None) -> None:
        self._name = name
        self._tools = tools
        self._token_names = token_names
        self._items: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._num_events = 0
        # Tokens whose pieces have not arrived yet, and logprobs of content that has no text yet.
        self._tokens: deque[tuple[int, pb.TokenLogprobs]] = deque()
        self._unsent: list[TokenLogprob] = []

    def event(self, kind: str, **members: Any) -> ResponseEvent:
        """Return the next event of the stream."""
        self._num_events += 1
        return ResponseEvent(type=f"response.{kind}", sequence_number=self._num_events - 1, **members)

    def items(self) -> list[OutputItem]:
        """Return the items so far."""
        return [*self._items, *([self._open.item("incomplete")] if self._open else [])]

    def add(self, message: pb.GenerateStreamResponse) -> Iterator[ResponseEvent]:
        """Add a message of the answer's stream, and yield its events."""
        if self._token_names is not None:
            self._tokens.extend(zip(message.token_ids, message.logprobs, strict=True))
        for piece in message.pieces:
            yield from self._add(piece)

    def end(self, *, is_complete: bool) -> Iterator[ResponseEvent]:
        """End the last item, and yield its events; a complete answer has at least an empty message."""
        types = {item.type for item in self.items()}
        if is_complete and types <= {"reasoning"}:
            yield from self._begin(_MESSAGE, pb.ToolCall())
        yield from self._end("completed" if is_complete else "incomplete")

    def _add(self, piece: pb.Piece) -> Iterator[ResponseEvent]:
        tokens = [self._tokens.popleft() for _ in range(min(piece.num_tokens, len(self._tokens)))]
        call, kind = piece.tool_call, _MESSAGE
        text = piece.reasoning or piece.content or call.arguments
        if piece.HasField("tool_call"):
            tool = self._tools[call.name].tool if call.name in self._tools else None
            kind = _INPUT if isinstance(tool, ResponseCustomTool) else _ARGUMENTS
        elif piece.HasField("reasoning"):
            kind = _REASONING
        elif self._token_names is not None:
            self._unsent += _logprobs(self._token_names, tokens)
        if not text and not call.name:
            return
        if call.name or self._open is None or not (piece.HasField("tool_call") or self._open.kind == kind):
            yield from self._begin(kind, call)
        opened = self._open
        assert opened is not None
        opened.texts.append(text)
        # The input of a custom tool is sent whole: it is a JSON text of which parts mean nothing.
        if text and opened.kind != _INPUT:
            yield self._delta(opened, text)

    def _begin(self, kind: str, call: pb.ToolCall) -> Iterator[ResponseEvent]:
        yield from self._end("completed")
        if kind != _MESSAGE:
            self._unsent = []
        item_id = f"{_TYPES[kind][1]}_{self._name}_{len(self._items)}"
        name, namespace = call.name, None
        if name in self._tools:
            name, namespace = self._tools[name].tool.name, self._tools[name].namespace
        opened = self._open = _OpenItem(kind, item_id, call, name, namespace)
        yield self._item_event("output_item.added", item=opened.item("in_progress"))
        if not opened.is_call:
            yield self._item_event("content_part.added", opened, part=opened.part())

    def _delta(self, opened: _OpenItem, text: str) -> ResponseEvent:
        members: dict[str, Any] = {"delta": text}
        if opened.kind == _MESSAGE:
            members["logprobs"], self._unsent = self._unsent, []
            opened.logprobs += members["logprobs"]
        return self._item_event(f"{opened.kind}.delta", opened, **members)

    def _end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if (opened := self._open) is None:
            return
        text = opened.text()
        if opened.kind == _INPUT and text:
            yield self._delta(opened, text)
        elif opened.kind == _MESSAGE and self._unsent:
            # These are the logprobs of tokens after the last text, such as the one that ended the answer.
            yield self._delta(opened, "")
        members: dict[str, Any] = {opened.text_field: text}
        if opened.kind == _MESSAGE:
            members["logprobs"] = list(opened.logprobs)
        yield self._item_event(f"{opened.kind}.done", opened, **members)
        if not opened.is_call:
            yield self._item_event("content_part.done", opened, part=opened.part())
        item, self._open = opened.item(status), None
        yield self._item_event("output_item.done", item=item)
        self._items.append(item)

    def _item_event(self, kind: str, opened: _OpenItem | None = None, **members: Any) -> ResponseEvent:
        """Return an event of the newest item, or of its text, if the open item is given."""
        if opened is not None:
            members["item_id"] = opened.id
            if not opened.is_call:
                members["content_index"] = 0
        return self.event(kind, output_index=len(self._items), **members)


def _logprobs(names: TokenNames, tokens: list[tuple[int, pb.TokenLogprobs]]) -> list[TokenLogprob]:
    """Return the logprobs of tokens; a token that is only part of a character has no bytes."""
    content = chat_logprobs(names, [each for each, _ in tokens], [each for _, each in tokens]).content or []
    for token in (each for own in content for each in (own, *own["top_logprobs"])):
        token["bytes"] = token["bytes"] or []
    return content
