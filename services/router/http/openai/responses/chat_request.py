"""Translates a request to ``/v1/responses`` to one for a chat completion, which the model can answer."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import to_json

from quire.rpc.errors import InvalidArgument, quoted
from quire.services.router.http.openai.requests import ChatCompletionRequest
from quire.services.router.http.openai.responses import requests
from quire.services.router.http.shared.errors import invalid_body

FIELD_NAMES = {
    "chat": "input",
    "chat.messages": "input",
    "messages": "input",
    "token_ids": "input",
    "chat.template_arguments": "reasoning",
    "stopping.max_tokens": "max_output_tokens",
    "response.logprobs": "top_logprobs",
    "format.json_schema": "text.format",
}
"""Names that fields of a chat completion, and of ``quire.v1``, have in requests for responses."""


class KnownTool(NamedTuple):
    """A tool that the model may call, and the namespace that it is in."""

    tool: requests.ResponseFunctionTool | requests.ResponseCustomTool
    namespace: str | None = None


def known_tools(body: requests.ResponseRequest) -> dict[str, KnownTool]:
    """Return the tools by the names under which the model knows them.

    Raises:
        InvalidArgument: two tools have the same name.
    """
    known: dict[str, KnownTool] = {}
    for tool in body.tools:
        namespace = tool.name if isinstance(tool, requests.NamespaceTool) else None
        for each in tool.tools if isinstance(tool, requests.NamespaceTool) else [tool]:
            if isinstance(each, requests.ResponseFunctionTool | requests.ResponseCustomTool):
                name = _flat_name(each.name, namespace)
                if name in known:
                    raise InvalidArgument("tools", f"has two tools of the name {quoted(name)}")
                known[name] = KnownTool(each, namespace)
    return known


def chat_request(body: requests.ResponseRequest, tools: dict[str, KnownTool]) -> ChatCompletionRequest:
    """Return the request for a chat completion with the same prompt and the same answer.

    Raises:
        InvalidArgument: a field has a value that a chat cannot have; the error names the field.
    """
    if body.top_logprobs and requests.LOGPROBS not in body.include:
        raise InvalidArgument("top_logprobs", f"needs {requests.LOGPROBS} in include")
    form: dict[str, Any] = {"type": body.text.format.type}
    if isinstance(body.text.format, requests.JsonSchemaText):
        schema = body.text.format.model_dump(exclude={"type"}, exclude_unset=True, by_alias=True)
        form["json_schema"] = schema
    chat = {
        "model": body.model,
        "messages": _messages(body),
        "tools": [_tool(name, known.tool) for name, known in tools.items()] or None,
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort,
        "verbosity": body.text.verbosity,
        "response_format": form,
        "max_completion_tokens": 1 if body.prompt_cache_options.prewarm else body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": requests.LOGPROBS in body.include,
        "top_logprobs": body.top_logprobs or None,
    }
    try:
        return ChatCompletionRequest.model_validate(chat)
    except ValidationError as error:
        raise invalid_body(error, to_json(chat)) from None


def _flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _messages(body: requests.ResponseRequest) -> list[dict[str, Any]]:
    """Return the messages; the items of one answer, which follow each other, become one message.

    So do system messages that follow each other, because many templates allow only one.
    """
    items = body.input
    if isinstance(items, str):
        items = [requests.InputMessage(type="message", role="user", content=items)]
    if body.instructions is not None:
        items = [requests.InputMessage(type="message", role="system", content=body.instructions), *items]
    messages: list[dict[str, Any]] = []
    for role, group in groupby(map(_message, items), key=itemgetter("role")):
        alike = list(group)
        if role in ("user", "tool"):
            messages += alike
            continue
        texts: defaultdict[str, list[Any]] = defaultdict(list)
        between = "\n\n" if role == "system" else ""
        for message in alike:
            for name in message.keys() - {"role"}:
                texts[name] += message[name] if name == "tool_calls" else [message[name]]
        # Joined once: appending to a text of megabytes for each item would take seconds.
        joined = {name: each if name == "tool_calls" else between.join(each) for name, each in texts.items()}
        messages.append({"role": role, **joined})
    return messages


def _message(item: requests.InputItem) -> dict[str, Any]:
    """Return an item as a message of its own."""
    if isinstance(item, requests.InputMessage):
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": _text(item.content)}
    if isinstance(item, requests.CallOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    if isinstance(item, requests.ReasoningInput):
        return {"role": "assistant", "reasoning_content": item.text}
    kind = "function" if isinstance(item, requests.FunctionCallInput) else "custom"
    called = {
        "name": _flat_name(item.name, item.namespace),
        **item.model_dump(include={"arguments", "input"}),
    }
    call = {"id": item.call_id, "type": kind, kind: called}
    return {"role": "assistant", "tool_calls": [call]}


def _text(content: str | list[requests.InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tool(name: str, tool: requests.ResponseFunctionTool | requests.ResponseCustomTool) -> dict[str, Any]:
    members = {"name": name, **tool.model_dump(include={"description", "parameters"}, exclude_none=True)}
    if isinstance(tool, requests.ResponseCustomTool):
        if isinstance(tool.format, requests.RegexFormat):
            grammar = tool.format.model_dump(exclude={"type"})
            members["format"] = {"type": "grammar", "grammar": grammar}
    elif tool.strict:
        members["strict"] = True
    return {"type": tool.type, tool.type: members}


def _choice(body: requests.ResponseRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, requests.ToolName):
        return _named(choice)
    if isinstance(choice, requests.ResponseAllowedTools):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: requests.ToolName) -> dict[str, Any]:
    return {"type": tool.type, tool.type: {"name": _flat_name(tool.name, tool.namespace)}}
