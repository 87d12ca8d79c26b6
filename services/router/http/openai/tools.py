"""Handles tool calls: describes the tools to the model, and reads its calls from its text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, quoted
from quire.services.router.http.openai.answer_bodies import FunctionCall, ToolCall
from quire.services.router.http.openai.requests import CalledTool, ChatCompletionRequest, NamedTool, Tool
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.stop_strings import StopMatcher

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
"""Marks around a call, which is a JSON object, in the chat templates of Hermes, Qwen and others."""

_WRITTEN_CALL = re.compile(f"{CALL_BEGIN}(.*?){CALL_END}", re.DOTALL)


class ToolUse(NamedTuple):
    """A request's tools, and how the model may use them."""

    tools: Sequence[Tool] = ()
    """Tools that are described to the model."""
    must_call: bool = False
    """Whether the answer has to be a call."""
    function: str | None = None
    """Name of the only function that the model may call; None: any function."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""

    @classmethod
    def of(cls, body: ChatCompletionRequest) -> ToolUse:
        """Return the tool use that a request's fields describe.

        Raises:
            InvalidArgument: ``tool_choice`` demands a call, but there are no tools, or not the one it names.
        """
        tools, choice = body.tools or (), body.tool_choice
        if not tools and choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice", "needs tools to choose from")
        if choice == "none":
            return cls()
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in {tool.function.name for tool in tools}:
                raise InvalidArgument("tool_choice", f"names no tool of the request: {quoted(name)}")
            return cls(tools, True, name)
        return cls(tools, choice == "required", is_parallel=body.parallel_tool_calls is not False)

    def to_json(self) -> str:
        """Return the JSON of the tools for the chat template; empty if there are no tools."""
        return json.dumps([tool.model_dump(exclude_unset=True) for tool in self.tools]) if self.tools else ""

    def answer_format(self) -> pb.ResponseFormat | None:
        """Return the form of an answer that must be a call: the call's JSON and nothing else.

        Return None if no call is required.
        """
        if not self.must_call:
            return None
        functions = [tool.function for tool in self.tools if self.function in (None, tool.function.name)]
        definitions: dict[str, Any] = {}
        calls = []
        for function in functions:
            parameters = dict(function.parameters or {"type": "object"})
            # References in a schema are relative to its root, so the definitions have to move there.
            definitions.update(parameters.pop("$defs", {}))
            members = {"name": {"const": function.name}, "arguments": parameters}
            calls.append(
                {
                    "type": "object",
                    "properties": members,
                    "required": list(members),
                    "additionalProperties": False,
                }
            )
        schema = {"anyOf": calls, "$defs": definitions}
        return pb.ResponseFormat(json_schema=json.dumps(schema))


class Finished(NamedTuple):
    """The end of an answer: the content that ``feed`` has not returned yet, and the calls."""

    content: str
    calls: list[ToolCall]


class CallReader:
    """Separates an answer's content from its calls; the text may come in pieces of any size.

    A required call is the whole answer. An optional call is recognised only if the model's chat template
    contains the ``<tool_call>`` form; otherwise the text stays text. A call that is not valid JSON stays text
    too.
    """

    def __init__(self, use: ToolUse, template: ChatTemplate | None) -> None:
        self._must_call = use.must_call
        self._is_parallel = use.is_parallel
        is_known = bool(use.tools) and template is not None and CALL_BEGIN in template.source
        self._matcher = StopMatcher((CALL_BEGIN,) if is_known else ())
        self._text = ""
        self._holds = use.must_call

    def feed(self, text: str) -> str:
        """Add the next piece of the answer; return the new content that is certainly not part of a call."""
        self._text += text
        if self._holds:
            return ""
        fed = self._matcher.feed(text)
        self._holds = fed.is_stopped
        return fed.text

    def finish(self) -> Finished:
        """Return the rest of the content and the calls, at the end of the answer."""
        if not self._holds:
            return Finished(self._matcher.flush(), [])
        rest = self._text if self._must_call else self._text[self._text.index(CALL_BEGIN) :]
        written = [self._text] if self._must_call else _WRITTEN_CALL.findall(rest)
        calls = [_call(text) for text in written]
        if not calls or None in calls:
            return Finished(rest, [])
        content = "" if self._must_call else _WRITTEN_CALL.sub("", rest).strip()
        most = None if self._is_parallel else 1
        return Finished(content, [call for call in calls if call is not None][:most])


def template_calls(calls: Sequence[CalledTool]) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer in the form for chat templates, with arguments as objects.

    Raises:
        InvalidArgument: the arguments of a call are not a JSON object.
    """
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
        }
        for call in calls
    ]


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidArgument("messages", "the arguments of a tool call must be a JSON object, as text")
    return arguments


def _call(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    function = FunctionCall(name=str(name), arguments=json.dumps(arguments, ensure_ascii=False))
    return ToolCall(id=f"call_{secrets.token_hex(12)}", type="function", function=function)
