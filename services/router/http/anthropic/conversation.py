"""Translates Anthropic's messages and tools to a conversation of ``quire.v1``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.router.http.anthropic.requests import (
    Block,
    Message,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.tokenization.chat_template import ChatTemplate

_BILLING = "x-anthropic-billing-header:"
"""Beginning of the text with its version that Claude Code puts first; versions then share no prefix."""


def conversation(body: PromptFields, template: ChatTemplate | None) -> pb.Chat:
    """Return the conversation that the chat template renders.

    Raises:
        InvalidArgument: a message cannot have one of its blocks, or tools and choice contradict each other.
    """
    if body.messages[-1].role == "assistant":
        raise InvalidArgument(
            "messages", "must end with a user's message: an answer cannot be begun for the model"
        )
    tools = body.tools if body.tool_choice is None or body.tool_choice.type != "none" else None
    may_be_late = template is None or template.allows_late_system
    arguments = _template_arguments(body)
    return pb.Chat(
        messages=[*_system(body), *_messages(body.messages, late_system="system" if may_be_late else "user")],
        tools=json.dumps([_described(tool) for tool in tools]) if tools else "",
        tool_choice=_tool_choice(body.tool_choice, has_tools=bool(tools)),
        template_arguments=json.dumps(arguments) if arguments else "",
    )


def _system(body: PromptFields) -> Iterator[pb.ChatMessage]:
    texts = [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]
    kept = [text for text in texts if not text.startswith(_BILLING)]
    if kept:
        yield pb.ChatMessage(role="system", content="\n\n".join(kept))


def _messages(messages: Sequence[Message], *, late_system: str) -> Iterator[pb.ChatMessage]:
    """Yield the messages; neighbours of one role are one message.

    Args:
        late_system: role of system messages after the first message.
    """
    roles = [late_system if message.role == "system" else message.role for message in messages]
    for role, group in groupby(zip(roles, messages, strict=True), key=lambda each: each[0]):
        blocks = [block for _, message in group for block in message.blocks]
        yield from (_assistant(blocks) if role == "assistant" else _user(role, blocks))


def _assistant(blocks: Sequence[Block]) -> Iterator[pb.ChatMessage]:
    more: dict[str, Any] = {}
    if reasoning := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        more["reasoning_content"] = reasoning
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        more["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise InvalidArgument("messages", "a tool_result belongs into a user's message")
    content = "\n\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    yield pb.ChatMessage(role="assistant", content=content, more=json.dumps(more) if more else "")


def _user(role: str, blocks: Sequence[Block]) -> Iterator[pb.ChatMessage]:
    """Yield the results of tools, and then the text beside them."""
    texts = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            content = block.content or ""
            text = content if isinstance(content, str) else "\n\n".join(each.text for each in content)
            more = json.dumps({"tool_call_id": block.tool_use_id})
            yield pb.ChatMessage(role="tool", content=text, more=more)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
        else:
            raise InvalidArgument("messages", f"a {block.type} block belongs into the assistant's message")
    if texts:
        yield pb.ChatMessage(role=role, content="\n\n".join(texts))


def _described(tool: Tool) -> dict[str, Any]:
    """Return a tool in the form that chat templates know, which is OpenAI's."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _tool_choice(choice: ToolChoice | None, *, has_tools: bool) -> pb.ToolChoice | None:
    if not has_tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidArgument("tool_choice", "needs tools to choose from")
        return None
    if choice is None:
        return pb.ToolChoice()
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidArgument("tool_choice.name", "must be set with the type tool, and only then")
    return pb.ToolChoice(
        mode=pb.TOOL_MODE_UNSPECIFIED if choice.type == "auto" else pb.TOOL_MODE_REQUIRED,
        names=[choice.name] if choice.name is not None else [],
        is_single=choice.type == "tool" or bool(choice.disable_parallel_tool_use),
    )


def _template_arguments(body: PromptFields) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if body.thinking is not None:
        arguments["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        arguments["reasoning_effort"] = body.output_config.effort
    return arguments
