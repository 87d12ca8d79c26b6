"""Defines the bodies that clients send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.sampling.params import ResponseOptions
from quire.services.router.http.shared.fields import (
    AnswerFields,
    Body,
    Ignored,
    StopString,
    TokenCount,
    limits,
)

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class _Block(Body):
    """A part of a message."""

    cache_control: Ignored = None


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Ignored = None


class ThinkingBlock(_Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(_Block):
    """Reasoning that only another server can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(_Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = None


class ToolResultBlock(_Block):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: Ignored = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Message(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        """Content of the message in blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description="Whether every call follows the schema.")
    defer_loading: Literal[False] | None = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    cache_control: Ignored = None


class ToolChoice(Body):
    """How the model may use the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="With tool: the tool that must be called.")
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons; a budget is not enforced."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: Ignored = None
    display: Ignored = None


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Effort and form of the answer."""

    effort: str | None = Field(None, description="A variable of the chat template: reasoning_effort.")
    format: OutputFormat | None = None


class KeepAll(Body):
    """Everything."""

    type: Literal["all"]


class ContextEdit(Body):
    """An edit that removes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeepAll


class ContextManagement(Body):
    """Edits of the conversation."""

    edits: list[ContextEdit] | None = None


class PromptFields(AnswerFields):
    """The fields that make the prompt."""

    model: str
    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Ignored = None
    metadata: dict[str, Any] | None = Field(None, description="session_id names the session.")
    speed: Literal["standard"] | None = None
    inference_geo: Ignored = None
    service_tier: Ignored = None


class CountTokensRequest(PromptFields):
    """The body of ``/v1/messages/count_tokens``."""


class MessagesRequest(PromptFields):
    """The body of ``/v1/messages``."""

    max_tokens: TokenCount = Field(description="0 computes the prompt only, so that its blocks are cached.")
    stop_sequences: Annotated[list[StopString], limits("stop_strings", ResponseOptions)] | None = None
    temperature: Annotated[float, limits("temperature")] | None = None
    top_p: Annotated[float, limits("top_p")] | None = None
    top_k: TokenCount | None = None
