"""Anthropic's messages: the conversation that the model gets, and the events of an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.router.http.anthropic.answer_bodies import Answer, MessageEvent
from quire.services.router.http.anthropic.conversation import conversation
from quire.services.router.http.anthropic.requests import MessagesRequest
from quire.services.router.http.anthropic.writer import SIGNATURE, MessagesWriter, _input
from quire.services.router.http.shared.json_text import to_json
from quire.tokenization.chat_template import ChatTemplate

TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}
MODEL = cast("ServedModel", SimpleNamespace(name="m", max_model_len=100, chat_template=None))
REFUSES_LATE_SYSTEM = ChatTemplate(
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('late') }}{% endif %}{{ message.content }}{% endfor %}",
    {},
)


def request(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 50, "messages": messages or [user("hi")], **fields}
    return MessagesRequest.model_validate_json(json.dumps(body))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def rendered(body: MessagesRequest, template: ChatTemplate | None = None) -> list[tuple[str, str, Any]]:
    chat = conversation(body, template)
    return [(each.role, each.content, json.loads(each.more or "{}")) for each in chat.messages]


def test_a_tool_turn_becomes_messages_that_templates_know() -> None:
    body = request(
        user([text("Weather?", cache_control={"type": "ephemeral"})]),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text("I look."),
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        user([text("Now?"), {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sun")]}]),
        user("And?"),
        tools=[TOOL],
        system=[text("x-anthropic-billing-header: 1"), text("Be brief."), text("Be kind.")],
    )
    call = {
        "id": "toolu_1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Rome"}},
    }
    assert rendered(body) == [
        ("system", "Be brief.\n\nBe kind.", {}),
        ("user", "Weather?", {}),
        ("assistant", "I look.", {"reasoning_content": "Hm.", "tool_calls": [call]}),
        ("tool", "sun", {"tool_call_id": "toolu_1"}),
        ("user", "Now?\n\nAnd?", {}),
    ]
    (described,) = json.loads(conversation(body, None).tools)
    function = {"name": "weather", "description": "of a city", "parameters": {"type": "object"}}
    assert described == {"type": "function", "function": function}


def test_the_texts_of_an_assistants_message_stay_apart() -> None:
    parts: list[dict[str, Any]] = [
        {"role": "assistant", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": "c"},
    ]
    assert rendered(request(user("?"), *parts, user("!")))[1] == ("assistant", "a\n\nb\n\nc", {})


def test_a_late_system_message_stays_in_its_place() -> None:
    body = request(user("a"), {"role": "system", "content": "b"}, user("c"), system="s")
    roles = [role for role, _, _ in rendered(body)]
    assert roles == ["system", "user", "system", "user"]
    refused = rendered(body, REFUSES_LATE_SYSTEM)
    assert refused == [("system", "s", {}), ("user", "a\n\nb\n\nc", {})]


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_single"),
    [
        (None, "TOOL_MODE_UNSPECIFIED", [], False),
        ({"type": "auto", "disable_parallel_tool_use": True}, "TOOL_MODE_UNSPECIFIED", [], True),
        ({"type": "any"}, "TOOL_MODE_REQUIRED", [], False),
        ({"type": "tool", "name": "weather"}, "TOOL_MODE_REQUIRED", ["weather"], True),
    ],
)
def test_tool_choices(choice: Any, mode: str, names: list[str], is_single: bool) -> None:
    wanted = conversation(request(tools=[TOOL], tool_choice=choice), None).tool_choice
    assert (pb.ToolMode.Name(wanted.mode), list(wanted.names), wanted.is_single) == (mode, names, is_single)


def test_no_tools_are_described_if_none_may_be_called() -> None:
    assert not conversation(request(tools=[TOOL], tool_choice={"type": "none"}), None).tools


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: must be set"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "must end with a user's message"),
        ({"messages": [user([{"type": "thinking", "thinking": "a"}])]}, "belongs into the assistant's"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        conversation(request(**fields), None)


@pytest.mark.parametrize(
    "fields",
    [
        {"container": "c"},
        {"mcp_servers": []},
        {"messages": [user([{"type": "image", "source": {}}])]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{**TOOL, "defer_loading": True}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    ],
)
def test_unsupported_fields_of_messages_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        request(**fields)


def test_requests_of_coding_agents_are_accepted() -> None:
    body = request(
        user([text("hi", cache_control={"type": "ephemeral", "ttl": "1h"})]),
        tools=[{**TOOL, "input_schema": {"$schema": "x", "type": "object", "propertyNames": {}}}],
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        metadata={"user_id": "{}"},
        stream=True,
    )
    arguments = json.loads(conversation(body, None).template_arguments)
    assert arguments == {"enable_thinking": True, "reasoning_effort": "high"}


def answered(
    *pieces: pb.Piece, finish: Any = pb.FINISH_REASON_STOP, size: int = 1, **last: Any
) -> list[pb.GenerateStreamResponse]:
    """Return the messages of a stream with ``size`` pieces in each."""
    parts = [pieces[at : at + size] for at in range(0, len(pieces), size)]
    messages = [pb.GenerateStreamResponse(pieces=part) for part in parts]
    usage = pb.Usage(prompt_tokens=20, completion_tokens=30, cached_prompt_tokens=16, reasoning_tokens=5)
    messages.append(pb.GenerateStreamResponse(finish_reason=finish, usage=usage, **last))
    messages[0].prompt_tokens = 20
    return messages


def writer(**fields: Any) -> MessagesWriter:
    return MessagesWriter(request(**fields), MODEL, "1", asyncio.Lock())


def events(messages: Sequence[pb.GenerateStreamResponse], **fields: Any) -> list[dict[str, Any]]:
    async def stream() -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        for message in messages:
            yield message

    async def collected() -> list[MessageEvent]:
        return [event async for event in writer(**fields).events(stream())]

    return [json.loads(to_json(event)) for event in asyncio.run(collected())]


def whole(messages: Sequence[pb.GenerateStreamResponse], **fields: Any) -> dict[str, Any]:
    answer = writer(**fields).whole(messages)
    assert isinstance(answer, Answer)
    return cast("dict[str, Any]", json.loads(to_json(answer)))


def folded(sent: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer that a client builds from events, and check their order."""
    first, ping, *blocks, delta, stop = sent
    assert [first["type"], ping["type"], stop["type"]] == ["message_start", "ping", "message_stop"]
    answer: dict[str, Any] = first["message"]
    arguments, is_open = "", False
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(answer["content"])
            answer["content"].append(event["content_block"])
            arguments, is_open = "", True
            continue
        assert is_open
        assert event["index"] == len(answer["content"]) - 1
        block = answer["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(arguments or "{}")
            continue
        kind, (member, value) = event["delta"].pop("type"), next(iter(event["delta"].items()))
        expected = {"thinking_delta": "thinking", "signature_delta": "thinking", "text_delta": "text"}
        assert block["type"] == expected.get(kind, "tool_use")
        if kind == "input_json_delta":
            arguments += value
        else:
            block[member] += value
    assert not is_open
    assert delta["type"] == "message_delta"
    return {**answer, **delta["delta"], "usage": delta["usage"]}


def call(name: str, arguments: str = "", index: int = 0) -> pb.Piece:
    return pb.Piece(
        tool_call=pb.ToolCall(index=index, id=f"call_{index}" if name else "", name=name, arguments=arguments)
    )


def test_an_answer_with_all_kinds_of_blocks() -> None:
    messages = answered(
        pb.Piece(reasoning="H"),
        pb.Piece(reasoning="m"),
        pb.Piece(content="I look."),
        call("weather", '{"city"'),
        call("", ': "Rome"}'),
        call("clock", "{}", 1),
        finish=pb.FINISH_REASON_TOOL_CALLS,
    )
    answer = whole(messages)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": SIGNATURE},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_0", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_1", "name": "clock", "input": {}},
    ]
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 30,
        "output_tokens_details": {"thinking_tokens": 5},
    }


_PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: pb.Piece(reasoning=text), st.text(max_size=3)),
        st.builds(lambda text: pb.Piece(content=text), st.text(max_size=3)),
        st.builds(
            lambda key: [call("tool", '{"'), call("", f'{key}": 1'), call("", "}")], st.sampled_from("ab")
        ),
    ),
    max_size=8,
)


@given(_PIECES, st.integers(1, 4))
def test_the_events_add_up_to_the_whole_answer(drawn: list[Any], size: int) -> None:
    pieces = [piece for each in drawn for piece in (each if isinstance(each, list) else [each])]
    messages = answered(*pieces, size=size)
    assert folded(events(messages)) == whole(messages)
    assert whole(messages)["content"]


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_string": "END"}, "stop_sequence", "END"),
        ({"finish": pb.FINISH_REASON_LENGTH}, "max_tokens", None),
    ],
)
def test_stop_reasons(last: dict[str, Any], reason: str, sequence: str | None) -> None:
    answer = whole(answered(pb.Piece(content="a"), **last))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_an_answer_that_reaches_the_models_length_says_so() -> None:
    messages = answered(pb.Piece(content="a"), finish=pb.FINISH_REASON_LENGTH)
    messages[-1].usage.completion_tokens = 80
    assert whole(messages)["stop_reason"] == "model_context_window_exceeded"


def test_without_tokens_only_the_prompt_is_computed() -> None:
    messages = answered(pb.Piece(content="a"), finish=pb.FINISH_REASON_LENGTH)
    answer = whole(messages, max_tokens=0)
    assert (answer["content"], answer["usage"]["output_tokens"]) == ([], 0)
    assert folded(events(messages, max_tokens=0)) == answer
    (generation,) = writer(max_tokens=0).generations()
    assert generation.stopping.max_tokens == 1


def test_a_call_that_was_cut_has_an_empty_input() -> None:
    messages = answered(call("weather", '{"city": "Ro'), finish=pb.FINISH_REASON_LENGTH)
    answer = whole(messages)
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": "\\ud83d!"}', {"a": "?!"}), ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", {})],
)
def test_arguments_that_json_cannot_have_again_do_not_fail(arguments: str, expected: dict[str, Any]) -> None:
    assert _input(arguments) == expected
