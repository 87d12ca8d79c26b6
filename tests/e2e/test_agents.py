"""Agents against a real stack: each runs the tool that the model calls, and sends the result back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agents
import anthropic
import openai
import pytest

from tests.testing.scripted_model import make_scripted_model
from tests.testing.stacks import StartStack

QUESTION, SENTENCE = "How is the weather in Rome?", "It is sunny in Rome."


@pytest.fixture(scope="module")
def url(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model: Path = tmp_path_factory.mktemp("scripted")
    make_scripted_model(model, {"weather": {"city": "Rome"}}, SENTENCE)
    with start_stack("llama", model=str(model), served_model_name="tiny", http_port=0) as running:
        yield f"http://{running.http_address}"


@pytest.fixture
def cities() -> list[str]:
    """Arguments with which the tool was called."""
    return []


@pytest.fixture
def tools(cities: list[str]) -> list[Any]:
    """Two functions, so that the model has a choice."""

    def weather(city: str) -> str:
        """Return the weather in a city."""
        cities.append(city)
        return "sunny"

    def clock(city: str) -> str:
        """Return the time in a city."""
        raise NotImplementedError

    return [weather, clock]


@pytest.mark.parametrize("is_stream", [False, True])
def test_anthropics_tool_runner(url: str, tools: list[Any], cities: list[str], is_stream: bool) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    runner: Any = client.beta.messages.tool_runner(
        model="tiny",
        max_tokens=100,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[anthropic.beta_tool(tool) for tool in tools],
        stream=is_stream,
    )
    answers = [each.get_final_message() if is_stream else each for each in runner]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    assert answers[1].content[0].text == SENTENCE
    assert cities == ["Rome"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("kind", [agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def test_openai_agents(
    url: str, tools: list[Any], cities: list[str], kind: Any, is_stream: bool
) -> None:
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        functions: list[Any] = [agents.function_tool(tool) for tool in tools]
        agent = agents.Agent(name="helper", model=kind("tiny", client), tools=functions)
        if is_stream:
            streamed = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            output = streamed.final_output
        else:
            output = (await agents.Runner.run(agent, QUESTION)).final_output
    assert output == SENTENCE
    assert cities == ["Rome"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("uses_responses", [False, True])
def test_an_agent_of_langgraph(
    url: str, tools: list[Any], cities: list[str], uses_responses: bool, is_stream: bool
) -> None:
    langchain = pytest.importorskip("langchain.agents", reason="langchain is not installed")
    clients = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    model = clients.ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key="none", use_responses_api=uses_responses
    )
    agent = langchain.create_agent(model, tools)
    asked = {"messages": [("user", QUESTION)]}
    if is_stream:
        *_, (_, state) = agent.stream(asked, stream_mode=["messages", "values"])
    else:
        state = agent.invoke(asked)
    assert [message.type for message in state["messages"]] == ["human", "ai", "tool", "ai"]
    assert state["messages"][-1].text == SENTENCE
    assert cities == ["Rome"]


@pytest.mark.parametrize(("name", "path"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm(monkeypatch: pytest.MonkeyPatch, url: str, name: str, path: str) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # Otherwise it downloads prices.
    litellm = pytest.importorskip("litellm", reason="litellm is not installed")
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    asked: dict[str, Any] = {
        "model": f"{name}/tiny",
        "api_base": f"{url}{path}",
        "api_key": "none",
        "messages": messages,
        "max_tokens": 100,
        "tools": [
            {"type": "function", "function": {"name": tool, "parameters": parameters}}
            for tool in ("weather", "clock")
        ],
    }
    message = litellm.completion(**asked).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
    messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SENTENCE
