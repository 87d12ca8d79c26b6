"""Translates OpenAI's tools, the choice among them, and earlier calls to ``quire.v1``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.router.http.openai.requests import (
    AllowedTools,
    CalledTool,
    ChatCompletionRequest,
    CustomTool,
    NamedTool,
    Tool,
)


class ToolUse(NamedTuple):
    """A request's tools, and how the model may use them."""

    tools: Sequence[Tool] = ()
    """Tools that are described to the model."""
    choice: pb.ToolChoice | None = None

    @classmethod
    def of(cls, body: ChatCompletionRequest) -> ToolUse:
        """Return the tool use that a request's fields describe."""
        tools, choice = body.tools or (), body.tool_choice
        if choice == "none" or (choice in (None, "auto") and not tools):
            return cls()
        wanted = pb.ToolChoice(is_single=body.parallel_tool_calls is False or isinstance(choice, NamedTool))
        mode: object = choice
        if isinstance(choice, AllowedTools):
            mode = choice.allowed_tools.mode
            wanted.names.extend(tool.name for tool in choice.allowed_tools.tools)
        elif isinstance(choice, NamedTool):
            wanted.names.append(choice.name)
        if mode not in (None, "auto"):
            wanted.mode = pb.TOOL_MODE_REQUIRED
        return cls(tools, wanted)

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools whose input is a text."""
        return frozenset(tool.custom.name for tool in self.tools if isinstance(tool, CustomTool))

    def to_json(self) -> str:
        """Return the JSON of the tools for the chat template; empty if there are no tools."""
        return json.dumps([_described(tool) for tool in self.tools]) if self.tools else ""


def _described(tool: Tool) -> dict[str, Any]:
    """Return a tool as a function, since chat templates know only functions."""
    if not isinstance(tool, CustomTool):
        return tool.model_dump(exclude_unset=True)
    text = {"type": "string"}
    if tool.custom.format is not None and tool.custom.format.grammar is not None:
        text["pattern"] = f"^(?:{tool.custom.format.grammar.definition})$"
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = tool.custom.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": parameters, "strict": True}}


def input_of(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function; of a part of them, the part."""
    try:
        # A model may write half of a surrogate pair, which UTF-8 cannot express.
        return str(json.loads(arguments)["input"]).encode(errors="replace").decode()
    except (ValueError, TypeError, KeyError, RecursionError):
        return arguments


def template_calls(calls: Sequence[CalledTool]) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer in the form for chat templates, with arguments as objects.

    Raises:
        InvalidArgument: the arguments of a call are not a JSON object.
    """
    return [{"id": call.id, "type": "function", "function": _called(call)} for call in calls]


def _called(call: CalledTool) -> dict[str, Any]:
    if call.custom is not None:
        return {"name": call.custom.name, "arguments": {"input": call.custom.input}}
    if call.function is None:
        raise InvalidArgument("messages", "a tool call must have a function, or be custom")
    return {"name": call.function.name, "arguments": _arguments(call.function.arguments)}


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidArgument("messages", "the arguments of a tool call must be a JSON object, as text")
    return arguments
