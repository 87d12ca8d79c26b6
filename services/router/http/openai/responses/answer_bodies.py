"""Defines the answers of ``/v1/responses`` and the events of their streams."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from quire.services.router.http.openai.answer_bodies import TokenLogprob
from quire.services.router.http.shared.json_text import SLICE_MEMBERS
from quire.services.router.http.shared.streams import TypedEvent

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputPart(BaseModel):
    """The text of a message or of reasoning; only that of a message has the other members."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    """Always empty: the server runs no tools whose results a text could cite."""
    logprobs: list[TokenLogprob] | None = None
    """Logprobs of the tokens if the request includes them."""


class OutputItem(BaseModel):
    """A message, reasoning or a call; its type determines which members it has."""

    id: str
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    status: ItemStatus
    role: Literal["assistant"] | None = None
    summary: list[Any] | None = None
    """Always empty: reasoning is returned as it is."""
    content: list[OutputPart] | None = None
    call_id: str | None = None
    namespace: str | None = None
    name: str | None = None
    arguments: str | None = None
    """A JSON object, as text; only part of one if the answer was cut off."""
    input: str | None = None


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens", "cache_write_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class Response(BaseModel):
    """The answer of ``/v1/responses``, with fields of the request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ItemStatus | Literal["failed"]
    error: dict[Literal["code", "message"], str] | None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None

    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[Any]
    reasoning: dict[str, Any]
    text: dict[str, Any]
    store: Literal[False]
    background: Literal[False]
    truncation: Literal["disabled"]
    metadata: dict[str, str]
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ResponseEvent(TypedEvent):
    """An event of a stream; its type determines which members it has."""

    sequence_number: int
    """Number of the event in its stream, from 0."""
    response: Response | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def is_large(self) -> bool:
        """Whether the event takes long to write, since it has the logprobs of a long text."""
        items = self.response.output if self.response else [self.item] if self.item else []
        parts = [self, self.part, *(part for item in items for part in item.content or ())]
        return any(part and part.logprobs and len(part.logprobs) > SLICE_MEMBERS for part in parts)


class InputTokens(BaseModel):
    """The answer of ``/v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int
