"""OpenAI's client against ``/v1/responses`` of a router, whose workers write reasoning, content and calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from quire.tokenization.tokenizer import Tokenizer
from tests.testing.thinking_model import copy_with_thinking

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {
        "type": "namespace",
        "name": "files",
        "description": "",
        "tools": [{"type": "function", "name": "read"}],
    },
]
WRITTEN = """<think>
look it up
</think>

so <tool_call>
{"name": "weather", "arguments": {"city": "x"}}
</tool_call>
<tool_call>
{"name": "patch", "arguments": {"input": "a"}}
</tool_call>
<tool_call>
{"name": "files__read", "arguments": {}}
</tool_call>"""


def parts(response: Any) -> list[tuple[Any, ...]]:
    """Return what the items of an answer say, without their ids."""
    said = []
    for item in response.output:
        text = getattr(item, "arguments", None) or getattr(item, "input", None) or item.content[0].text
        said.append((item.type, getattr(item, "namespace", None), getattr(item, "name", None), text))
    return said


async def test_an_answer_with_every_kind_of_item_whole_and_streamed(
    pair: Any, model_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pair.script.answer[:] = [*await tokenizer.encode(WRITTEN, add_special_tokens=False), 1]
    pair.change(max_model_len=1024)
    await pair.start(http_port=0, model=str(copy_with_thinking(model_folder, tmp_path / "thinking")))
    url = f"http://{pair.running.http.address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        request: Any = {
            **{"model": "tiny", "input": "x", "tools": TOOLS},
            **{"include": ["message.output_text.logprobs"]},
        }
        whole: Any = await client.responses.create(**request)
        async with client.responses.stream(**request) as stream:
            kinds = [event.type async for event in stream]
            streamed: Any = await stream.get_final_response()
        cut = await client.responses.create(**request, max_output_tokens=len(pair.script.answer) - 8)
    assert parts(whole) == [
        ("reasoning", None, None, "look it up"),
        ("message", None, None, "so"),
        ("function_call", None, "weather", '{"city": "x"}'),
        ("custom_tool_call", None, "patch", "a"),
        ("function_call", "files", "read", "{}"),
    ]
    assert parts(streamed) == parts(whole)
    assert streamed.output[1].content[0].logprobs == whole.output[1].content[0].logprobs
    assert "so" in "".join(each.token for each in whole.output[1].content[0].logprobs)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert whole.usage is not None
    assert whole.usage.output_tokens == len(pair.script.answer)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in cut.output] == [*["completed"] * 4, "incomplete"]
    assert parts(cut)[:4] == parts(whole)[:4]
