"""Requests to ``/v1/responses``: what reaches the model, what has no effect, and what is refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI, NotFoundError

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.openai.responses.writer import ResponseWriter
from quire.services.router.http.shared.bodies import _parse
from quire.services.router.http.shared.json_text import to_json

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object"},
}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are Codex, a coding agent.",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Approval policy: never."}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "<environment_context/>"},
                {"type": "input_text", "text": "Fix the bug."},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I look at it."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_2",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "status": "completed",
            "call_id": "call_1",
            "name": "exec_command",
            "arguments": '{"cmd":"ls -l"}',
        },
        {
            "type": "function_call",
            "call_id": "call_2",
            "namespace": "mcp__docs",
            "name": "find",
            "arguments": "{}",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "bug.py"},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "no "}, {"type": "input_text", "text": "docs"}],
        },
        {"type": "custom_tool_call", "call_id": "call_3", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
        },
        {"type": "function", "name": "update_plan", "strict": True, "parameters": {"type": "object"}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files."},
        {
            "type": "namespace",
            "name": "mcp__docs",
            "description": "Tools of the server docs.",
            "tools": [
                {"type": "function", "name": "find", "strict": False, "parameters": {"type": "object"}}
            ],
        },
        {"type": "web_search", "external_web_access": False, "search_context_size": "low"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-session",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
}


def writer(body: Any) -> ResponseWriter:
    """Return the writer of a body, which was read as the server reads it."""
    request = _parse(json.dumps(body).encode(), ResponseRequest)
    model: Any = SimpleNamespace(name="tiny", tokenizer=SimpleNamespace(text_of=str))
    return ResponseWriter(request, model, "r1", asyncio.Lock())


def generation(**fields: Any) -> pb.Generation:
    (each,) = writer({"input": "hi", **fields}).generations()
    return each


def refusal(**fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        generation(**fields)
    return caught.value.message


def test_the_request_of_codex_is_accepted() -> None:
    sent = generation(**CODEX)
    messages = [(each.role, each.content) for each in sent.chat.messages]
    assert messages == [
        ("system", "You are Codex, a coding agent.\n\nApproval policy: never."),
        ("user", "<environment_context/>Fix the bug."),
        ("assistant", "Looking."),
        *(("tool", "bug.py"), ("tool", "no docs")),
        ("assistant", ""),
        ("tool", "Done"),
    ]
    answer = json.loads(sent.chat.messages[2].more)
    assert answer["reasoning_content"] == "I look at it."
    assert [call["function"] for call in answer["tool_calls"]] == [
        {"name": "exec_command", "arguments": {"cmd": "ls -l"}},
        {"name": "mcp__docs__find", "arguments": {}},
    ]
    assert [call["id"] for call in answer["tool_calls"]] == ["call_1", "call_2"]
    patch = json.loads(sent.chat.messages[5].more)["tool_calls"][0]
    assert patch["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin"}}
    assert json.loads(sent.chat.messages[4].more) == {"tool_call_id": "call_2"}
    functions = [tool["function"] for tool in json.loads(sent.chat.tools)]
    assert [each["name"] for each in functions] == [
        "exec_command",
        "update_plan",
        "apply_patch",
        "mcp__docs__find",
    ]
    assert [each.get("strict") for each in functions] == [None, True, True, None]
    assert functions[0] == {
        **{name: CODEX["tools"][0][name] for name in ("name", "description", "parameters")}
    }
    assert json.loads(sent.chat.template_arguments) == {"reasoning_effort": "medium", "verbosity": "low"}
    assert sent.response.parse


def test_the_answer_to_codex_has_the_fields_of_its_request() -> None:
    response = writer(CODEX).whole([])
    written = json.loads(to_json(response))
    assert written["tools"] == [*CODEX["tools"][:4], {"type": "web_search", "external_web_access": False}]
    for name in ("tool_choice", "parallel_tool_calls", "reasoning", "prompt_cache_key", "instructions"):
        assert written[name] == CODEX[name]
    assert written["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert written["store"] is False
    assert "client_metadata" not in written


def test_the_fields_of_a_whole_answer_have_the_values_that_apply() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    sent = {
        "text": {"format": form},
        "temperature": 0.5,
        "top_p": 0.25,
        "metadata": {"a": "b"},
        "store": True,
    }
    written = json.loads(to_json(writer({"input": "hi", **sent}).whole([])))
    assert {name: written[name] for name in sent} == {**sent, "store": False}
    plain = json.loads(to_json(writer({"input": "hi"}).whole([])))
    assert plain["tool_choice"] == "auto"
    assert "temperature" not in plain
    assert (plain["text"], plain["tools"], plain["metadata"]) == ({"format": {"type": "text"}}, [], {})
    assert (plain["parallel_tool_calls"], plain["truncation"], plain["background"]) == (
        True,
        "disabled",
        False,
    )


def test_the_models_own_defaults_apply_to_fields_that_are_absent() -> None:
    sampling = generation().sampling
    assert not sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert not generation().stopping.HasField("max_tokens")


EFFECTS: list[tuple[str, dict[str, Any], Any]] = [
    ("model", {"model": "x"}, "x"),
    ("sampling.temperature", {"temperature": 0.5}, 0.5),
    ("sampling.top_p", {"top_p": 0.5}, 0.5),
    ("stopping.max_tokens", {"max_output_tokens": 5}, 5),
    ("response.logprobs", {"include": ["message.output_text.logprobs"], "top_logprobs": 3}, 3),
    ("format.json_schema", {"text": {"format": {"type": "json_object"}}}, '{"type":"object"}'),
    (
        "format.json_schema",
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}}},
        '{"type": "array"}',
    ),
    (
        "chat.template_arguments",
        {"reasoning": {"effort": "none"}},
        '{"enable_thinking": false, "reasoning_effort": "none"}',
    ),
    ("chat.tool_choice.is_single", {"tools": [WEATHER], "parallel_tool_calls": False}, True),
    ("chat.tool_choice.mode", {"tools": [WEATHER], "tool_choice": "required"}, pb.TOOL_MODE_REQUIRED),
    ("chat.tools", {"tools": [WEATHER], "tool_choice": "none"}, ""),
    (
        "chat.tool_choice.names",
        {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}},
        ["weather"],
    ),
    (
        "chat.tool_choice.names",
        {
            "tools": CODEX["tools"],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [
                    {"type": "function", "name": "find", "namespace": "mcp__docs"},
                    {"type": "custom", "name": "apply_patch"},
                ],
            },
        },
        ["mcp__docs__find", "apply_patch"],
    ),
]


@pytest.mark.parametrize(("path", "fields", "value"), EFFECTS)
def test_a_field_reaches_the_model(path: str, fields: dict[str, Any], value: Any) -> None:
    found: Any = generation(**fields)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_a_regular_expression_holds_the_input_of_a_custom_tool() -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    (tool,) = json.loads(generation(tools=[{"type": "custom", "name": "n", "format": form}]).chat.tools)
    assert "[0-9]+" in tool["function"]["parameters"]["properties"]["input"]["pattern"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id: is not supported: send the earlier items"),
    ({"conversation": "conv_1"}, "conversation: is not supported: send its items"),
    ({"background": True}, "background: input should be False"),
    ({"prompt": {"id": "p"}}, "prompt: is not supported: send its text"),
    ({"context_management": []}, "context_management: is not supported: leave out"),
    ({"max_tool_calls": 3}, "max_tool_calls: is not supported: leave it out"),
    ({"moderation": {}}, "moderation: is not supported: moderate"),
    ({"truncation": "auto"}, "truncation: input should be 'disabled'"),
    (
        {"include": ["file_search_call.results"]},
        r"include.0: input should be 'message\.output_text\.logprobs' or",
    ),
    ({"top_logprobs": 2}, r"top_logprobs: needs message\.output_text\.logprobs in include"),
    ({"seed": 1}, "seed: is not a field of this API"),
    ({"input": []}, "input: list should have at least 1 item"),
    (
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input.0: input tag 'item_reference' .* 'message'",
    ),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0: has only encrypted_content"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]},
        "input: the arguments",
    ),
    (
        {"tools": [{"type": "web_search", "external_web_access": True}]},
        "tools.0.external_web_access: input should be False",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0.external_web_access: field required"),
    ({"tools": [WEATHER, WEATHER]}, "tools: has two tools of the name 'weather'"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.function.name: string should match pattern"),
    (
        {"tools": [{**WEATHER, "name": f"f{at}"} for at in range(129)]},
        "tools: list should have at most 128 items",
    ),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools.0.defer_loading: is not a field"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type: input should be 'function' or 'custom'"),
    (
        {"text": {"format": {"type": "json_schema", "name": "n"}, "verbosity": "x"}},
        "text.verbosity: input should be",
    ),
    *(
        ({"tools": [{"type": kind}]}, f"tools.0: input tag '{kind}' .* 'function', 'custom'")
        for kind in ("file_search", "mcp", "code_interpreter", "image_generation", "computer", "tool_search")
    ),
    *(
        (
            {"input": [{"role": "user", "content": [{"type": kind}]}]},
            "input.0.content.0.type: input should be 'input_text'",
        )
        for kind in ("input_image", "input_file", "refusal")
    ),
    (
        {
            "tools": [
                {
                    "type": "custom",
                    "name": "p",
                    "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
                }
            ]
        },
        "tools.0.format.syntax: input should be 'regex'",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_unsupported_fields_of_responses_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    assert re.match(message, refusal(**fields))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "r1"), ("DELETE", "r1"), ("POST", "r1/cancel"), ("GET", "r1/input_items")]
)
async def test_no_earlier_answer_is_found(http: ClientSession, method: str, path: str) -> None:
    async with http.request(method, f"/v1/responses/{path}", json={}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "not_found")
        assert error["message"].startswith("no answer is stored")


async def test_the_tokens_of_a_prompt_are_counted(client: AsyncOpenAI, pair: Any) -> None:
    counted = await client.responses.input_tokens.count(model="tiny", input="say it", instructions="be brief")
    answer = await client.responses.create(model="tiny", input="say it", instructions="be brief")
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens > 0
    with pytest.raises(NotFoundError):
        await client.responses.input_tokens.count(model="other", input="say it")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_errors_of_the_prompt_are_about_the_input(http: ClientSession, path: str) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"input": "hi", "tools": [WEATHER]}, "tools"),
        (
            {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n"}}, "top_logprobs": 2},
            "top_logprobs",
        ),
    ]
    if path == "/v1/responses":
        bodies += [
            ({"input": "x" * 100}, "input"),
            ({"input": "hi", "max_output_tokens": 1 << 40}, "max_output_tokens"),
        ]
    for body, param in bodies:
        async with http.post(path, json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param)
