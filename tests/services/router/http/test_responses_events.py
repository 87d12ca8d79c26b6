"""The events of ``/v1/responses``, from hand-made pieces: what every client can rebuild from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import ResourceExhausted, Unavailable
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.openai.responses.writer import ResponseWriter
from quire.services.router.http.shared.errors import from_service_error
from quire.services.router.http.shared.json_text import is_large, to_json, to_json_in_steps
from quire.services.router.http.shared.streams import _framed

Event = dict[str, Any]
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "files",
        "description": "",
        "tools": [{"type": "function", "name": "read"}],
    },
]
# The parts of an answer: kind, text, and for a call its name.
Part = tuple[str, str, str]
ANSWER: list[Part] = [
    ("reasoning", "They want the weather.", ""),
    ("content", "I will look it up. Århus 🌧", ""),
    ("call", '{"city": "Århus", "days": [1, 2]}', "weather"),
    ("call", '{"input": "*** Begin\\n+ Ørsted \\"x\\"\\n"}', "patch"),
    ("call", "{}", "files__read"),
]


def messages(parts: Sequence[Part], cuts: Sequence[int] = (), **last: Any) -> list[pb.GenerateStreamResponse]:
    """Return the messages of a stream of these parts, which is cut at these characters of the whole text."""
    at, index = 0, -1
    sent = [pb.GenerateStreamResponse(prompt_tokens=9)]
    for kind, text, name in parts:
        index += kind == "call"
        call_id = f"call_{index}"
        start, places = 0, sorted({cut - at for cut in cuts if 0 < cut - at < len(text)})
        for end in [*places, len(text)]:
            if start:
                name = call_id = ""
            if start or end in places:
                sent.append(pb.GenerateStreamResponse())
            piece = pb.Piece(num_tokens=1)
            if kind == "call":
                call = pb.ToolCall(index=index, id=call_id, name=name, arguments=text[start:end])
                piece.tool_call.CopyFrom(call)
            else:
                setattr(piece, kind, text[start:end])
            sent[-1].pieces.append(piece)
            start = end
        at += len(text)
        if at in cuts:
            sent.append(pb.GenerateStreamResponse())
    usage = pb.Usage(prompt_tokens=9, completion_tokens=7, cached_prompt_tokens=4, reasoning_tokens=3)
    sent.append(pb.GenerateStreamResponse(**{"finish_reason": pb.FINISH_REASON_STOP, "usage": usage, **last}))
    return sent


def writer(**fields: Any) -> ResponseWriter:
    body = ResponseRequest.model_validate({"input": "hi", "tools": TOOLS, **fields})
    tokenizer = SimpleNamespace(text_of=lambda token: "\ufffd" if token == 9 else f"<{token}>")
    model: Any = SimpleNamespace(name="demo", tokenizer=tokenizer)
    return ResponseWriter(body, model, "r1", asyncio.Lock())


async def arriving(
    sent: Sequence[pb.GenerateStreamResponse],
) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    for message in sent:
        yield message


async def stream(sent: Sequence[pb.GenerateStreamResponse], **fields: Any) -> list[Event]:
    """Return the events as a client reads them."""
    return [json.loads(to_json(event)) async for event in writer(**fields).events(arriving(sent))]


def fold(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the output that a client builds from additions only, without any text of a ``done`` event."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "content_part.added":
            assert event["content_index"] == len(items[-1]["content"])
            items[-1]["content"].append(json.loads(json.dumps(event["part"])))
        elif kind.endswith("text.delta"):
            items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            if "logprobs" in event:
                items[-1]["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        elif kind.endswith(".delta"):
            items[-1]["input" if "input" in kind else "arguments"] += event["delta"]
        elif kind == "output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert items[-1] == event["item"]
    return items


AFTER = {
    "": {"created"},
    "created": {"in_progress"},
    "in_progress": {"output_item.added", "incomplete"},
    "output_item.added": {
        "content_part.added",
        *("function_call_arguments.delta", "function_call_arguments.done"),
        *("custom_tool_call_input.delta", "custom_tool_call_input.done"),
    },
    "content_part.added": {
        *("output_text.delta", "output_text.done", "reasoning_text.delta", "reasoning_text.done")
    },
    "output_text.delta": {"output_text.delta", "output_text.done"},
    "reasoning_text.delta": {"reasoning_text.delta", "reasoning_text.done"},
    "function_call_arguments.delta": {"function_call_arguments.delta", "function_call_arguments.done"},
    "custom_tool_call_input.delta": {"custom_tool_call_input.done"},
    "output_text.done": {"content_part.done"},
    "reasoning_text.done": {"content_part.done"},
    "content_part.done": {"output_item.done"},
    "function_call_arguments.done": {"output_item.done"},
    "custom_tool_call_input.done": {"output_item.done"},
    "output_item.done": {"output_item.added", "completed", "incomplete"},
    "completed": {"end"},
    "incomplete": {"end"},
}
"""Which types may follow a type of event, without their ``response.``."""


def check(events: Sequence[Event]) -> None:
    """Check order, numbers, ids and fields, and that the final answer is what was sent."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    for before, after in zip(["", *kinds], [*kinds, "end"], strict=True):
        assert after in AFTER[before], (before, after)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert fold(events) == final["output"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == final["output"][event["output_index"]]["id"]
        SDK_EVENT.validate_python(event, strict=True)


async def sdk_final(sent: Sequence[pb.GenerateStreamResponse]) -> Response:
    """Return the answer that the stream helper of OpenAI's client builds."""
    body = b"".join([_framed(event, to_json(event)) async for event in writer().events(arriving(sent))])
    headers = {"Content-Type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, headers=headers, content=body))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = AsyncOpenAI(base_url="http://quire/v1", api_key="none", http_client=http)
        async with client.responses.stream(model="demo", input="hi") as events:
            async for _ in events:
                pass
            return cast(Response, await events.get_final_response())


async def test_the_events_of_an_answer_with_every_kind_of_item() -> None:
    events = await stream(messages(ANSWER, range(1, 200, 3)))
    check(events)
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == [
        *("reasoning", "message", "function_call", "custom_tool_call", "function_call")
    ]
    reasoning, message, call, patch, read = final["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": ANSWER[0][1]}]
    assert message["content"][0]["text"] == ANSWER[1][1]
    assert (call["call_id"], call["name"], call["arguments"]) == ("call_0", "weather", ANSWER[2][1])
    assert (patch["name"], patch["input"]) == ("patch", '*** Begin\n+ Ørsted "x"\n')
    assert (read["namespace"], read["name"], read["arguments"]) == ("files", "read", "{}")
    assert "namespace" not in call
    assert final["status"] == "completed"
    assert final["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 16,
    }


@given(
    st.lists(
        st.tuples(st.sampled_from(["reasoning", "content", "call"]), st.text(max_size=8), st.just("weather")),
        max_size=5,
    ),
    st.lists(st.integers(1, 40)),
)
def test_the_answer_does_not_depend_on_how_its_pieces_were_split(parts: list[Part], cuts: list[int]) -> None:
    split = asyncio.run(stream(messages(parts, cuts)))
    check(split)
    assert split[-1]["response"]["output"] == asyncio.run(stream(messages(parts)))[-1]["response"]["output"]


@given(st.sets(st.integers(1, 200)))
def test_the_sdk_and_the_whole_answer_agree_with_the_events(cuts: set[int]) -> None:
    sent = messages(ANSWER, sorted(cuts))
    whole = writer().whole(sent)
    expected = json.loads(to_json(whole))
    streamed = asyncio.run(stream(sent))[-1]["response"]
    assert streamed["output"] == expected["output"]
    read = asyncio.run(sdk_final(sent))
    parsed = json.loads(read.to_json(exclude_unset=True))
    for item in parsed["output"]:
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    assert parsed["output"] == expected["output"]
    Response.model_validate(expected, strict=True)


@pytest.mark.parametrize(
    ("parts", "types"),
    [
        ([], ["message"]),
        ([("reasoning", "so", "")], ["reasoning", "message"]),
        ([("content", "", "")], ["message"]),
        ([("call", "", "weather")], ["function_call"]),
        (
            [("content", "a", ""), ("reasoning", "b", ""), ("content", "c", "")],
            ["message", "reasoning", "message"],
        ),
    ],
)
async def test_a_complete_answer_has_a_message_or_a_call(parts: list[Part], types: list[str]) -> None:
    events = await stream(messages(parts))
    check(events)
    assert [item["type"] for item in events[-1]["response"]["output"]] == types


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5])
async def test_an_answer_of_the_most_tokens_is_incomplete(length: int) -> None:
    parts = ANSWER[:length]
    if parts:
        parts[-1] = (parts[-1][0], parts[-1][1][:-1], parts[-1][2])
    events = await stream(messages(parts, finish_reason=pb.FINISH_REASON_LENGTH))
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in final["output"]] == [
        *["completed"] * (length - 1),
        *["incomplete"] * (length > 0),
    ]
    check(events)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Unavailable("the worker ended"), "server_error", "the worker ended"),
        (
            ResourceExhausted("full", retry_after_seconds=1.5),
            "rate_limit_exceeded",
            "full; try again in 1.5s",
        ),
    ],
)
async def test_a_failure_in_the_middle_is_an_event_with_what_was_sent(
    error: Any, code: str, message: str
) -> None:
    failing = writer()

    async def failing_messages() -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        async for each in arriving(messages(ANSWER[:2])[:-1]):
            yield each
        raise error

    sent = []
    with pytest.raises(type(error)):
        async for event in failing.events(failing_messages()):
            sent.append(json.loads(to_json(event)))
    last = json.loads(to_json(failing.failed(from_service_error(error))))
    SDK_EVENT.validate_python(last, strict=True)
    assert (last["type"], last["sequence_number"]) == ("response.failed", len(sent))
    response = last["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": code, "message": message})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert fold(sent)[-1]["content"] == response["output"][-1]["content"]


def logprobs(*token_ids: int) -> dict[str, Any]:
    each = [
        pb.TokenLogprobs(logprob=-1.0, top=[pb.CandidateLogprob(token_id=5, logprob=-0.5)]) for _ in token_ids
    ]
    return {"token_ids": token_ids, "logprobs": each}


async def test_logprobs_are_those_of_the_content_however_late_its_text_comes() -> None:
    sent = [
        pb.GenerateStreamResponse(pieces=[pb.Piece(reasoning="so", num_tokens=2)], **logprobs(1, 2, 3)),
        pb.GenerateStreamResponse(pieces=[pb.Piece(content="", num_tokens=1)], **logprobs(4)),
        pb.GenerateStreamResponse(pieces=[pb.Piece(content="ab", num_tokens=2)], **logprobs(9)),
        pb.GenerateStreamResponse(
            pieces=[pb.Piece(content="", num_tokens=1)],
            finish_reason=pb.FINISH_REASON_STOP,
            usage=pb.Usage(prompt_tokens=3, completion_tokens=6),
            **logprobs(6),
        ),
    ]
    events = await stream(sent, include=["message.output_text.logprobs"], top_logprobs=1)
    check(events)
    (part,) = events[-1]["response"]["output"][1]["content"]
    assert [token["token"] for token in part["logprobs"]] == ["<3>", "<4>", "\ufffd", "<6>"]
    assert [token["bytes"] for token in part["logprobs"]][2:] == [[], list(b"<6>")]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "<5>", "logprob": -0.5, "bytes": list(b"<5>")}]


async def test_an_event_with_many_logprobs_is_written_in_steps() -> None:
    ids = range(100)
    message = pb.GenerateStreamResponse(pieces=[pb.Piece(content="x", num_tokens=100)], **logprobs(*ids))
    whole = writer(include=["message.output_text.logprobs"])
    events = [event async for event in whole.events(arriving([message]))]
    names = [event.type for event in events if is_large(event)]
    assert names == [
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert [json.loads(to_json(event)) for event in events] == [
        json.loads(to_json_in_steps(event)) for event in events
    ]


async def test_a_request_that_only_fills_the_cache_gets_no_output() -> None:
    body = {"prompt_cache_options": {"prewarm": True}, "max_output_tokens": 7}
    (generation,) = writer(**body).generations()
    assert generation.stopping.max_tokens == 1
    sent = messages(ANSWER[:1], finish_reason=pb.FINISH_REASON_LENGTH)
    *_, last = await stream(sent, **body)
    assert (last["type"], last["response"]["output"]) == ("response.completed", [])
    assert last["response"]["usage"]["output_tokens"] == 0
    assert last["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
