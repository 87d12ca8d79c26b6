"""OpenAI's messages as a conversation for the chat template: nothing that it may read is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.router.http.openai.conversation import conversation
from quire.services.router.http.openai.requests import ChatCompletionRequest
from quire.services.router.http.openai.tools import ToolUse


def chat(*messages: dict[str, Any], **more: Any) -> pb.Chat:
    body = ChatCompletionRequest.model_validate({"messages": list(messages), **more})
    return conversation(body.messages, ToolUse.of(body), body.chat_template_kwargs or {})


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "7", "type": "function", "function": function}]}


def test_roles_and_parts_are_those_that_templates_know() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    sent = chat({"role": "developer", "content": "brief"}, {"role": "user", "content": parts})
    assert [(each.role, each.content) for each in sent.messages] == [("system", "brief"), ("user", "one two")]
    assert [each.more for each in sent.messages] == ["", ""]
    assert (sent.tools, sent.template_arguments) == ("", "")


def test_further_members_of_a_message_reach_the_template_and_unknown_ones_do_not() -> None:
    message: dict[str, Any] = {
        **{"role": "tool", "content": "sunny", "name": "weather", "tool_call_id": "7"},
        **{"refusal": None, "annotations": [], "reasoning_content": "so"},
    }
    [sent] = chat(message).messages
    assert json.loads(sent.more) == {"name": "weather", "tool_call_id": "7", "reasoning_content": "so"}


@pytest.mark.parametrize(("text", "arguments"), [('{"city": "Århus"}', {"city": "Århus"}), ("", {})])
def test_the_arguments_of_an_earlier_call_become_an_object(text: str, arguments: dict[str, Any]) -> None:
    [sent] = chat(call(text)).messages
    assert sent.content == ""
    assert json.loads(sent.more)["tool_calls"] == [
        {"id": "7", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    ]


@pytest.mark.parametrize("text", ["[]", "7", "{", "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="must be a JSON object") as caught:
        chat(call(text))
    assert caught.value.field == "messages"


def test_tools_and_variables_are_passed_on_as_they_were_sent() -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "x"}
    sent = chat(user, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    assert json.loads(sent.tools) == [tool]
    assert json.loads(sent.template_arguments) == {"enable_thinking": False}
    assert chat(user, tools=[tool], tool_choice="none").tools == ""
