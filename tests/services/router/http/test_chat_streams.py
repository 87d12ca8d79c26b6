"""The events of divided answers: their order, and that they add up to the whole answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from quire.tokenization.tokenizer import Tokenizer
from tests.testing.thinking_model import copy_with_thinking

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = {"messages": [{"role": "user", "content": "x"}], "seed": 7}
ORDER = re.compile(r"first (reasoning )*(content )*(head (arguments )+)*finish usage done")
"""A stream's events, in words."""
Ask = Callable[..., Coroutine[Any, Any, Any]]


@pytest.fixture
async def ask(
    pair: Any, model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> AsyncIterator[Callable[[str], Coroutine[Any, Any, Ask]]]:
    """Return a function from what the model writes to one that asks the router over HTTP."""
    folder = copy_with_thinking(model_folder, tmp_path / "thinking")
    sessions: list[ClientSession] = []

    async def start(written: str, **options: Any) -> Ask:
        pair.script.answer[:] = [*await tokenizer.encode(written, add_special_tokens=False), 1]
        pair.change(max_model_len=512)
        if pair.running is None:
            await pair.start(http_port=0, model=str(folder), **options)
        sessions.append(ClientSession(f"http://{pair.running.http.address}"))

        async def ask(**body: Any) -> Any:
            async with sessions[-1].post("/v1/chat/completions", json={**CHAT, **body}) as response:
                assert response.status == 200, await response.text()
                if not body.get("stream"):
                    return await response.json()
                return [line[6:] for line in (await response.text()).split("\n\n") if line]

        return ask

    yield start
    for session in sessions:
        await session.close()


def word(event: str) -> str:
    """Return what an event is; fail if it is more than one thing."""
    if event == "[DONE]":
        return "done"
    body = json.loads(event)
    if not body["choices"]:
        return "usage"
    [choice] = body["choices"]
    delta = choice["delta"]
    if choice["finish_reason"]:
        assert delta == {}
        return "finish"
    if "role" in delta:
        assert delta == {"role": "assistant", "content": ""}
        return "first"
    [(kind, value)] = delta.items()
    if kind != "tool_calls":
        assert value
        return "reasoning" if kind == "reasoning_content" else str(kind)
    [call] = value
    name = "custom" if "custom" in call else "function"
    text = "input" if name == "custom" else "arguments"
    if "id" in call:
        assert (call["type"], set(call)) == (name, {"index", "id", "type", name})
        assert call[name] == {"name": call[name]["name"], text: ""}
        return "head"
    assert (set(call), set(call[name])) == ({"index", name}, {text})
    assert call[name][text]
    return "arguments"


def folded(events: list[str]) -> dict[str, Any]:
    """Return the message that the deltas of a stream add up to, and its finish reason."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            message["finish_reason"] = choice["finish_reason"]
            for kind, value in choice["delta"].items():
                if kind == "tool_calls":
                    call = message["calls"].setdefault(value[0]["index"], {"id": "", "text": "", "name": ""})
                    call["id"] += value[0].get("id", "")
                    for member in (value[0].get("function"), value[0].get("custom")):
                        call["name"] += (member or {}).get("name", "")
                        call["text"] += (member or {}).get("arguments", "") + (member or {}).get("input", "")
                elif kind != "role":
                    message[kind] += value
    return message


def as_folded(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer in the same form."""
    [choice] = whole["choices"]
    message = choice["message"]
    calls = {
        index: {
            "id": call["id"],
            "name": call[call["type"]]["name"],
            "text": call[call["type"]].get("arguments") or call[call["type"]].get("input"),
        }
        for index, call in enumerate(message.get("tool_calls", ()))
    }
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": calls,
        "finish_reason": choice["finish_reason"],
    }


@pytest.mark.parametrize(
    ("written", "content", "reasoning", "num_calls", "reason"),
    [
        ("hello world", "hello world", "", 0, "stop"),
        ("<think>\nsay the end\n</think>\n\nhello", "hello", "say the end", 0, "stop"),
        (f"<think>\nsay\n</think>\n\nso {CALL}\n{CALL}", "so", "say", 2, "tool_calls"),
        (CALL, "", "", 1, "tool_calls"),
        ("<think>\nsay", "", "say", 0, "stop"),
    ],
)
@pytest.mark.parametrize("tools", [True, False])
async def test_a_stream_has_its_order_and_is_the_whole_answer(
    ask: Any, written: str, content: str, reasoning: str, num_calls: int, reason: str, tools: bool
) -> None:
    asked = await ask(written)
    body: dict[str, Any] = {"tools": TOOLS} if tools else {}
    if num_calls and not tools:
        # Without tools, calls are text like any other.
        content, num_calls, reason = f"{content} {written[written.index(CALL) :]}".strip(), 0, "stop"
    whole = as_folded(await asked(**body))
    events = await asked(**body, stream=True, stream_options={"include_usage": True})
    assert ORDER.fullmatch(" ".join(map(word, events))), events
    assert folded(events) == whole
    assert (whole["content"], whole["reasoning_content"]) == (content, reasoning)
    assert [call["text"] for call in whole["calls"].values()] == ['{"a": "x"}'] * num_calls
    assert whole["finish_reason"] == reason


async def test_the_tokens_of_reasoning_and_content_add_up(ask: Any, tokenizer: Tokenizer, pair: Any) -> None:
    asked = await ask("<think>\nsay the end\n</think>\n\nhello world")
    whole = await asked(logprobs=True, return_token_ids=True)
    [choice], usage = whole["choices"], whole["usage"]
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    assert "".join(tokens).strip() == "hello world</s>"
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert usage["completion_tokens"] == num_reasoning + len(tokens) == len(choice["token_ids"])
    events = [
        json.loads(each) for each in (await asked(logprobs=True, return_token_ids=True, stream=True))[:-1]
    ]
    choices = [each["choices"][0] for each in events]
    sent = [each["token"] for one in choices for each in (one.get("logprobs") or {"content": []})["content"]]
    assert sent == tokens
    assert [each for one in choices for each in one.get("token_ids", [])] == pair.script.answer


async def test_special_tokens_are_asked_for_with_the_text_as_it_is(ask: Any) -> None:
    written = f"<think>\nsay\n</think>\n\n{CALL}"
    asked = await ask(written)
    whole = as_folded(await asked(tools=TOOLS, skip_special_tokens=False))
    assert whole["content"] == f"{written}</s>"
    assert (whole["calls"], whole["reasoning_content"]) == ({}, "")


async def test_stop_strings_end_only_content(ask: Any) -> None:
    asked = await ask("<think>\nsay stop\n</think>\n\nhello stop here")
    for keeps, content in ((False, "hello"), (True, "hello stop")):
        whole = as_folded(await asked(stop="stop", include_stop_str_in_output=keeps))
        assert (whole["reasoning_content"], whole["content"].strip()) == ("say stop", content)


@pytest.mark.parametrize("ignores_eos", [False, True], ids=["in parts", "whole"])
async def test_the_rest_of_a_cut_call_is_not_content(ask: Any, pair: Any, ignores_eos: bool) -> None:
    asked = await ask(f"so {CALL}")
    seen = set()
    for max_tokens in range(1, len(pair.script.answer)):
        whole = as_folded(await asked(tools=TOOLS, max_tokens=max_tokens, ignore_eos=ignores_eos))
        assert whole["finish_reason"] == "length"
        seen.add(len(whole["calls"]))
        if whole["calls"]:
            assert whole["content"] == "so"
    assert seen == {0, 1}


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answers_of_a_beam_search_are_divided(ask: Any, stream: bool) -> None:
    asked = await ask(f"<think>\nsay\n</think>\n\nso {CALL} ")
    body = {"tools": TOOLS, "n": 3, "use_beam_search": True, "stream": stream}
    answer = await asked(**body)
    if stream:
        assert {word(each) for each in answer} == {
            *("first", "reasoning", "content", "head", "arguments", "finish", "done")
        }
        return
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "say"


async def test_one_call_is_returned_if_calls_are_not_parallel(ask: Any) -> None:
    asked = await ask(f"{CALL}\n{CALL}")
    assert len(as_folded(await asked(tools=TOOLS, parallel_tool_calls=False))["calls"]) == 1


async def test_the_input_of_a_custom_tool_is_a_text(ask: Any) -> None:
    tools = [{"type": "custom", "custom": {"name": "f"}}]
    asked = await ask(CALL.replace('"a": "x"', '"input": "a\\nb"'))
    whole = as_folded(await asked(tools=tools))
    events = await asked(tools=tools, stream=True)
    assert folded(events) == whole
    assert whole["calls"][0]["text"] == "a\nb"


@pytest.mark.parametrize("num_left", [1, 2, 3, 8, 14])
async def test_a_custom_tool_that_is_cut_is_the_same_whole_and_streamed(ask: Any, num_left: int) -> None:
    tools = [{"type": "custom", "custom": {"name": "f"}}]
    asked = await ask(CALL.replace('"a": "x"', '"input": "a\\nb"')[: -len("\n</tool_call>") - num_left])
    choice = {"type": "custom", "custom": {"name": "f"}}
    body = {"tools": tools, "tool_choice": choice}
    whole = as_folded(await asked(**body))
    assert folded(await asked(**body, stream=True)) == whole


@pytest.mark.parametrize("stream", [True, False])
async def test_a_worker_that_fails_within_a_call_leaves_no_trace(
    ask: Any, pair: Any, fault: Any, stream: bool
) -> None:
    asked = await ask(f"<think>\nsay\n</think>\n\nso {CALL}")
    body = {"tools": TOOLS, "stream": stream}
    read: Any = folded if stream else as_folded
    before = read(await asked(**body))
    for at in (1, 20, len(pair.script.answer) - 3):
        pair.change("decode", fault=fault(at))
        assert read(await asked(**body)) == before
        pair["d1"].fault = pair["d2"].fault = None


@pytest.mark.parametrize(
    ("body", "param", "problem"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
            "tool_choice",
            "'g'",
        ),
        (
            {"tool_choice": "required", "tools": TOOLS, "response_format": {"type": "json_object"}},
            "tool_choice",
            "where the answer has response_format",
        ),
        (
            {"tool_choice": "required", "tools": TOOLS, "skip_special_tokens": False},
            "skip_special_tokens",
            "must not be false",
        ),
        ({"functions": []}, "functions", "is not a field"),
        ({"function_call": "auto"}, "function_call", "is not a field"),
        ({"audio": {}}, "audio", "is not a field"),
        ({"prediction": {}}, "prediction", "is not a field"),
        ({"web_search_options": {}}, "web_search_options", "is not a field"),
        ({"moderation": {}}, "moderation", "is not a field"),
        (
            {"tools": [{"type": "function", "function": {"name": "x" * 129}}]},
            "tools.0.function.name",
            "pattern",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "custom": {
                            "name": "f",
                            "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}},
                        },
                    }
                ]
            },
            "tools.0.custom.format.grammar.syntax",
            "'regex'",
        ),
    ],
)
async def test_fields_that_are_not_served_are_refused_by_name(
    ask: Any, pair: Any, body: dict[str, Any], param: str, problem: str
) -> None:
    await ask("hello")
    url = f"http://{pair.running.http.address}/v1/chat/completions"
    async with ClientSession() as session, session.post(url, json={**CHAT, **body}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert problem in error["message"]
