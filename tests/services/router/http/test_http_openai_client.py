"""OpenAI's own client against the router, whose workers say ``hello world, stop here``."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from quire.protos import inference_pb2 as pb
from tests.testing.until import until

TEXT = "hello world, stop here"
MESSAGES: Any = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "say "}, {"type": "text", "text": "it"}]},
]


async def test_the_model_is_listed(client: AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == "tiny"
    assert (await client.models.retrieve("tiny")).model_dump()["max_model_len"] == 64


@pytest.mark.parametrize(
    ("setting", "defaults", "silent"),
    [("auto", {"temperature": 0.25, "top_k": 20, "max_tokens": 3}, (0.25, 20, 3)), ("none", {}, (1, 0, 15))],
)
async def test_the_models_own_defaults_are_shown_and_apply(
    pair: Any, model_folder: Path, tmp_path: Path, setting: str, defaults: Any, silent: Any
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 20, "max_new_tokens": 3}')
    stub = await pair.start(http_port=0, model=str(folder), generation_config=setting)
    info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert dict(info.sampling_defaults) == defaults
    url = f"http://{pair.running.http.address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        (model,) = (await client.models.list()).data
        assert model.model_dump()["sampling_defaults"] == defaults
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
        await client.completions.create(
            model="tiny", prompt="say it", temperature=1, extra_body={"top_k": -1}
        )
    sent = [call.sequence for call in pair.calls("decode")]
    values = {(each.sampling.temperature, each.sampling.top_k, each.stopping.max_tokens) for each in sent}
    assert values == {silent, (1, 0, 16)}


async def test_a_completion(client: AsyncOpenAI, pair: Any) -> None:
    pair["p1"].num_cached_tokens = pair["p2"].num_cached_tokens = 4
    completion = await client.completions.create(model="tiny", prompt="say it", max_tokens=50)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    assert completion.object == "text_completion"
    assert completion.usage is not None
    assert (
        completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens
    )
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 4


async def test_sixteen_tokens_are_the_default_of_completions_only(client: AsyncOpenAI, pair: Any) -> None:
    await client.completions.create(model="tiny", prompt="say it")
    await client.chat.completions.create(model="tiny", messages=MESSAGES)
    calls = [call.sequence for call in pair.calls()]
    left = {64 - len(call.token_ids) for call in calls}
    assert {call.stopping.max_tokens for call in calls} == {16, min(left)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "most"), [(2, None), (50, "2")])
async def test_a_completion_with_too_many_tokens_ends_at_the_models_length(
    client: AsyncOpenAI, stream: bool, asked: int, most: str | None
) -> None:
    create: Any = client.completions.with_raw_response.create
    raw = await create(model="tiny", prompt=[5] * 62, max_tokens=asked, stream=stream)
    answer = raw.parse()
    chunks = [chunk async for chunk in answer] if stream else [answer]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert raw.headers.get("x-quire-max-tokens") == most


async def test_the_header_has_the_smallest_room_of_several_prompts(client: AsyncOpenAI) -> None:
    prompts = [[5] * 60, [5] * 61, [5]]
    raw = await client.completions.with_raw_response.create(model="tiny", prompt=prompts, max_tokens=50)
    assert raw.headers["x-quire-max-tokens"] == "3"


async def test_a_chat_with_too_many_tokens_ends_at_the_models_length(client: AsyncOpenAI, pair: Any) -> None:
    pair.script.answer = [5] * 70
    create: Any = client.chat.completions.with_raw_response.create
    raw = await create(model="tiny", messages=MESSAGES, max_completion_tokens=32000)
    answer = raw.parse()
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 64)
    assert raw.headers["x-quire-max-tokens"] == str(answer.usage.completion_tokens)


async def test_a_chat(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=2, logprobs=True, seed=-1, user="someone"
    )
    (choice,) = completion.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
    assert [token.logprob for token in choice.logprobs.content] == [0.0, -1.0]
    assert bytes(choice.logprobs.content[0].bytes or []).decode() == choice.logprobs.content[0].token


async def test_a_streamed_chat(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert choices[-1].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage is not None
    num_roles = 2
    # A chunk has the tokens of several steps if they come faster than they are sent.
    assert chunks[-1].usage.completion_tokens >= len(chunks[:-1]) - num_roles


async def test_the_stream_helper_collects_the_same_answer(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == TEXT


async def test_every_event_has_the_running_counts(client: AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model="tiny", prompt="say it", max_tokens=50, stream=True, stream_options=options
    )
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert counts == [*range(1, len(counts)), len(counts) - 1]
    assert len({usage.prompt_tokens for usage in usages if usage is not None}) == 1


async def test_prompts_of_a_list_are_numbered_in_order(client: AsyncOpenAI) -> None:
    completion = await client.completions.create(model="tiny", prompt=["a", "b", "c"], n=2, max_tokens=50)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3, 4, 5]
    assert {choice.text for choice in completion.choices} == {TEXT}
    stream = await client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=50, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [TEXT, TEXT]


async def test_the_salt_reaches_the_workers(client: AsyncOpenAI, pair: Any) -> None:
    salt = {"cache_salt": "mine"}
    await client.completions.create(model="tiny", prompt="say it", extra_body=salt)
    await client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=salt)
    calls = [call.sequence.cache_scope for call in pair.calls()]
    assert [scope.salt for scope in calls] == ["mine"] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnect_ends_the_request(client: AsyncOpenAI, pair: Any, stream: bool) -> None:
    pair.change(pause_before_token=2)
    create: Any = client.completions.create
    asking = asyncio.create_task(create(model="tiny", prompt="say it", max_tokens=50, stream=stream))
    decoders = (pair["d1"], pair["d2"])
    async with asyncio.timeout(5):
        await asyncio.wait(
            [asyncio.create_task(d.paused.wait()) for d in decoders], return_when=asyncio.FIRST_COMPLETED
        )
        (used,) = [decoder for decoder in decoders if decoder.paused.is_set()]
        if stream:
            await (await asking).close()
        asking.cancel()
        await used.aborted.wait()
        await until(lambda: not pair.metric("quire_router_requests_running"))
    assert pair.metric("quire_request_failure_total", grpc_code="CANCELLED") == 1
