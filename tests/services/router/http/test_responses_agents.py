"""An agent of openai-agents with a tool, whose model is ``/v1/responses`` with scripted pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.responses.requests import ResponseRequest
from quire.services.router.http.openai.responses.writer import ResponseWriter
from quire.services.router.http.shared.bodies import _parse
from quire.services.router.http.shared.json_text import to_json
from quire.services.router.http.shared.streams import _framed

CALL = pb.ToolCall(index=0, id="call_1", name="weather", arguments='{"city": "Århus"}')
ANSWERS = [
    [pb.Piece(reasoning="Look it up."), pb.Piece(tool_call=CALL)],
    [pb.Piece(content="It is "), pb.Piece(content="sunny.")],
]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_agent_calls_its_tool_and_answers(streams: bool) -> None:
    prompts: list[pb.Generation] = []

    async def answer(request: httpx2.Request) -> httpx2.Response:
        body = _parse(request.content, ResponseRequest)
        model: Any = SimpleNamespace(name="demo", tokenizer=SimpleNamespace(text_of=str))
        writer = ResponseWriter(body, model, f"r{len(prompts)}", asyncio.Lock())
        message = pb.GenerateStreamResponse(
            pieces=ANSWERS[len(prompts)], usage=pb.Usage(prompt_tokens=5, completion_tokens=3)
        )
        prompts.extend(writer.generations())
        if not body.stream:
            return httpx2.Response(200, content=to_json(writer.whole([message])))

        async def messages() -> AsyncGenerator[pb.GenerateStreamResponse, None]:
            yield message

        sent = [_framed(event, to_json(event)) async for event in writer.events(messages())]
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, content=b"".join(sent))

    def weather(city: str) -> str:
        """Return the weather of a city."""
        return f"sun over {city}"

    set_tracing_disabled(True)
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http:
        client = AsyncOpenAI(base_url="http://quire/v1", api_key="none", http_client=http)
        model = OpenAIResponsesModel(model="demo", openai_client=client)
        agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[function_tool(weather)])
        if streams:
            run = Runner.run_streamed(agent, "What is the weather in Århus?")
            async for _ in run.stream_events():
                pass
            final = run.final_output
        else:
            final = (await Runner.run(agent, "What is the weather in Århus?")).final_output
    assert final == "It is sunny."
    (first, second) = (each.chat for each in prompts)
    assert [message.role for message in first.messages] == ["system", "user"]
    assert json.loads(first.tools)[0]["function"]["strict"] is True
    assert [message.role for message in second.messages] == ["system", "user", "assistant", "tool"]
    assert second.messages[3].content == "sun over Århus"
    called = json.loads(second.messages[2].more)
    assert called["reasoning_content"] == "Look it up."
    assert called["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Århus"}}
