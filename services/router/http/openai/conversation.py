"""Translates OpenAI's messages to a conversation of ``quire.v1``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.requests import Message
from quire.services.router.http.openai.tools import ToolUse, template_calls


def conversation(messages: Sequence[Message], use: ToolUse, template_arguments: Mapping[str, Any]) -> pb.Chat:
    """Return the conversation that the chat template renders.

    Args:
        template_arguments: further variables of the chat template.

    Raises:
        InvalidArgument: a tool call of an earlier answer is malformed.
    """
    return pb.Chat(
        messages=[_message(message) for message in messages],
        tools=use.to_json(),
        tool_choice=use.choice,
        template_arguments=json.dumps(template_arguments) if template_arguments else "",
    )


def _message(message: Message) -> pb.ChatMessage:
    more: dict[str, Any] = message.model_dump(include={"name", "tool_call_id"}, exclude_none=True)
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        more["reasoning_content"] = reasoning
    if message.tool_calls:
        more["tool_calls"] = template_calls(message.tool_calls)
    return pb.ChatMessage(
        # "developer" is OpenAI's newer name of the role; templates know only the older one.
        role="system" if message.role == "developer" else message.role,
        content=message.text,
        more=json.dumps(more) if more else "",
    )
