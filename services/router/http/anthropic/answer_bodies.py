"""Defines the bodies that clients get; members that were not set are left out of the JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from quire.services.router.http.shared.streams import TypedEvent

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class Usage(BaseModel):
    """Token counts; the prompt's tokens are the sum of the three numbers of input tokens."""

    input_tokens: int
    """Tokens that were computed. In the first event of a stream: all tokens of the prompt."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    """Tokens whose keys and values were cached."""
    output_tokens: int
    output_tokens_details: dict[str, int] | None = None
    """``thinking_tokens``: those of reasoning."""


class Block(BaseModel):
    """A part of the answer: reasoning, a text or a call."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: str | None = None
    signature: str | None = None
    """A constant, since clients drop reasoning without a signature; it is never checked."""
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class Answer(BaseModel):
    """The answer of ``/v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class MessageEvent(TypedEvent):
    """An event of the stream of ``/v1/messages``; the type says which of the members it has."""

    message: Answer | None = None
    index: int | None = None
    content_block: Block | None = None
    delta: dict[str, str | None] | None = None
    usage: Usage | None = None


class TokenCount(BaseModel):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int
