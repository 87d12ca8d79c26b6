"""A router's streams that are read on after a lost connection, by OpenAI's client and over plain HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI

from quire.services.router.http.shared import resumable
from quire.services.router.http.shared.resumable import ANSWERS
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.api_keys import write_keys
from tests.testing.until import until

CHAT = {"messages": [{"role": "user", "content": "say it"}], "stream": True, "request_id": "r"}


def pause(pair: Any) -> None:
    """Let the decode workers wait before a token."""
    pair.change("decode", pause_before_token=2)


def go_on(pair: Any) -> None:
    for name in ("d1", "d2"):
        pair[name].goes_on.set()


@pytest.mark.parametrize("last", [0, 1, 3])
async def test_openais_client_goes_on(client: AsyncOpenAI, pair: Any, last: int) -> None:
    whole = [event async for event in await client.responses.create(model="tiny", input="x", stream=True)]
    pause(pair)
    begun: Any = []
    async for event in await client.responses.create(model="tiny", input="x", stream=True):
        begun.append(event)
        if event.sequence_number == 3:
            break
    name = begun[0].response.id
    go_on(pair)
    rest = [e async for e in await client.responses.retrieve(name, stream=True, starting_after=last)]
    both: Any = [*begun[: last + 1], *rest]
    assert [event.sequence_number for event in both] == list(range(len(both)))
    assert [event.type for event in both if "delta" not in event.type] == [
        event.type for event in whole if "delta" not in event.type
    ]
    assert both[-1].response.output_text == whole[-1].response.output_text == "hello world, stop here"  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError, match="no answer is stored"):
        await client.responses.retrieve(name)
    for refused in (client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no answer is stored"):
            await refused(name)
    with pytest.raises(openai.NotFoundError, match="no answer with this id is in flight here"):
        await client.responses.retrieve("resp_other", stream=True, starting_after=0)


async def test_an_abandoned_answer_ends_on_its_workers(
    client: AsyncOpenAI, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "GRACE_SECONDS", 0.05)
    pause(pair)
    stream = await client.responses.create(model="tiny", input="x", stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: any(pair[name].aborted.is_set() for name in ("d1", "d2")))
    await until(lambda: pair.metric("quire_router_requests_running") == 0)
    assert pair.metric("quire_request_failure_total", grpc_code="CANCELLED") == 1


async def test_a_chat_that_asks_for_it_goes_on(http: ClientSession, pair: Any) -> None:
    asked = {"Last-Event-ID": ""}
    async with http.post("/v1/chat/completions", json=CHAT, headers=asked) as response:
        whole = await response.read()
    events = whole.decode().split("\n\n")[:-1]
    assert [event.split("\n")[0] for event in events] == [f"id: r:{at}" for at in range(len(events))]
    for at in range(len(events)):
        last = {"Last-Event-ID": f"r:{at}"}
        async with http.post("/v1/chat/completions", json=CHAT, headers=last) as response:
            assert (await response.text()).split("\n\n")[:-1] == events[at + 1 :]
    for last_id, status in (("other:0", 404), ("r", 400), ("x:y", 400)):
        headers = {"Last-Event-ID": last_id}
        async with http.post("/v1/chat/completions", json=CHAT, headers=headers) as response:
            assert response.status == status


async def test_other_streams_are_as_before(http: ClientSession, pair: Any) -> None:
    for path, asks, headers in (
        ("/v1/chat/completions", CHAT, {}),
        ("/v1/completions", {"prompt": "x", "stream": True}, {"Last-Event-ID": "r:0"}),
    ):
        async with http.post(path, json=asks, headers=headers) as response:
            assert (await response.text()).startswith("data: {")


async def test_a_head_request_disturbs_no_reader(http: ClientSession, pair: Any) -> None:
    pause(pair)
    asks = {"input": "x", "stream": True, "request_id": "r"}
    async with http.post("/v1/responses", json=asks) as response:
        await response.content.readline()
        async with http.head("/v1/responses/resp_r", params={"stream": "true"}) as head:
            assert head.status == 404
        go_on(pair)
        assert "response.completed" in await response.text()


async def test_another_tenant_gets_nothing(start: Any, tmp_path: Path) -> None:
    file, keys = write_keys(tmp_path, Tenant("alice"), Tenant("bob"))
    http = await start(api_keys_file=file)
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in keys)
    asks = {"input": "x", "stream": True, "request_id": "r"}
    async with http.post("/v1/responses", json=asks, headers=alice) as response:
        whole = await response.read()
    url = "/v1/responses/resp_r?stream=true"
    async with http.get(url, headers=bob) as response:
        assert response.status == 404
    async with http.get(url, headers=alice) as response:
        assert await response.read() == whole


async def test_a_router_that_stops_ends_answers_without_a_reader(client: AsyncOpenAI, pair: Any) -> None:
    pause(pair)
    stream = await client.responses.create(model="tiny", input="x", stream=True)
    await anext(aiter(stream))
    await stream.close()
    answers = pair.running.http._runner.app[ANSWERS]
    ((answer,),) = ([*kept.values()] for kept in answers._kept.values())
    await until(lambda: answer._reader is None)
    assert not answer.task.done()
    async with asyncio.timeout(10):
        await pair.running.http.stop()
    assert answer.task.cancelled()


async def test_a_reader_learns_that_the_router_stops(http: ClientSession, pair: Any) -> None:
    pause(pair)
    asks = {"input": "x", "stream": True, "request_id": "r"}
    async with http.post("/v1/responses", json=asks) as response:
        await response.content.readline()
        finishing = asyncio.create_task(pair.running.calls.finish())
        await until(lambda: pair.running.calls.is_stopping)
        async with http.get("/v1/responses/resp_r?stream=true") as refused:
            assert refused.status == 503
        finishing.cancel()
        assert "response.failed" in await response.text()
