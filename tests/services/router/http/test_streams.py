"""Answers as server-sent events: what a client gets in which order, also when the answer fails or waits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, Unavailable
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.openai.answer_bodies import Text
from quire.services.router.http.shared import streams
from quire.services.router.http.shared.streams import encoded, run, send_events
from quire.services.router.tenants.api_keys import Tenant

WAIT_SECONDS = 5.0
Events = AsyncGenerator[BaseModel, None]


@asynccontextmanager
async def answering(events: Callable[[], Events]) -> AsyncIterator[ClientResponse]:
    """Return the response of a server that streams these events."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            sent = encoded(events(), b"data: [DONE]\n\n")
            return await send_events(request, sent, lambda error: error.body)
        except Unavailable as error:
            return web.Response(status=503, text=str(error))

    app = web.Application()
    app.router.add_get("/", handle)
    async with TestClient(TestServer(app)) as client, client.get("/") as response:
        yield response


async def data_of(response: ClientResponse) -> list[str]:
    """Return the data of all events, with comments as they are."""
    text = (await asyncio.wait_for(response.read(), WAIT_SECONDS)).decode()
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


async def test_no_events_are_a_stream_that_ends() -> None:
    async def events() -> Events:
        for _ in ():
            yield Text(prompt="none")

    async with answering(events) as response:
        assert await data_of(response) == ["[DONE]"]


async def test_an_error_before_the_first_event_is_a_status() -> None:
    async def events() -> Events:
        raise Unavailable("full")
        yield

    async with answering(events) as response:
        assert (response.status, await response.text()) == (503, "full")


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (Unavailable("a worker was lost"), "a worker was lost", "unavailable"),
        (RuntimeError("secret"), "internal error; the server's log has the details", "internal"),
    ],
)
async def test_a_later_error_is_the_last_event(error: Exception, message: str, code: str) -> None:
    async def events() -> Events:
        yield Text(prompt="a")
        raise error

    async with answering(events) as response:
        assert response.status == 200
        first, last = await data_of(response)
    assert json.loads(first) == {"prompt": "a"}
    detail = json.loads(last)["error"]
    assert (detail["message"], detail["code"]) == (message, code)


async def test_a_client_that_waits_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)
    may_begin = asyncio.Event()

    async def events() -> Events:
        await may_begin.wait()
        yield Text(prompt="a")

    async with answering(events) as response:
        comment = b": keep-alive\n\n"
        assert await asyncio.wait_for(response.content.readexactly(len(comment)), WAIT_SECONDS) == comment
        may_begin.set()
        *_, data, end = await data_of(response)
    assert (json.loads(data), end) == ({"prompt": "a"}, "[DONE]")


async def test_a_disconnect_ends_the_events() -> None:
    is_closed = asyncio.Event()

    async def events() -> Events:
        try:
            while True:
                yield Text(prompt="x" * 1000)
                await asyncio.sleep(0)
        finally:
            is_closed.set()

    async with answering(events) as response:
        await response.content.readany()
        response.close()
        await asyncio.wait_for(is_closed.wait(), WAIT_SECONDS)


class Servicer:
    """Answers a prompt with as many messages as its text has characters."""

    def __init__(self, num_places: int = 9) -> None:
        self._places = asyncio.Semaphore(num_places)
        self.running: set[str] = set()
        self.most_running = 0

    def deadline(self) -> float:
        return 0.0

    def places(self, tenant: Tenant, generations: Any) -> asyncio.Semaphore:
        return self._places

    async def generate(
        self, generation: pb.Generation, *_: Any
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        self.running.add(generation.text)
        self.most_running = max(self.most_running, len(self.running))
        try:
            for each in generation.text:
                await asyncio.sleep(0)
                if each == "!":
                    raise InvalidArgument("text", "is wrong")
                yield pb.GenerateStreamResponse(text=each)
        finally:
            self.running.remove(generation.text)

    def run(self, *texts: str) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        generations = [pb.Generation(text=text) for text in texts]
        names = [{"text": f"prompt[{at}]"} for at in range(len(texts))]
        return run(cast(GenerationServicer, self), Tenant(), generations, [], names)


@pytest.mark.parametrize("texts", [("abc",), ("abc", "defgh", "i")])
async def test_the_messages_of_each_prompt_keep_their_order(texts: tuple[str, ...]) -> None:
    found: dict[int, str] = dict.fromkeys(range(len(texts)), "")
    async for response in Servicer().run(*texts):
        found[response.index] += response.text
    assert tuple(found.values()) == texts


async def test_no_more_prompts_run_than_there_are_places() -> None:
    servicer = Servicer(num_places=2)
    assert len([each async for each in servicer.run("ab", "cd", "ef", "gh")]) == 8
    assert servicer.most_running == 2


@pytest.mark.parametrize(("texts", "field"), [(("!",), "prompt[0]"), (("abcdef", "!"), "prompt[1]")])
async def test_the_first_error_ends_all_and_has_the_clients_name(texts: tuple[str, ...], field: str) -> None:
    servicer = Servicer()
    with pytest.raises(InvalidArgument, match="is wrong") as caught:
        async for _ in servicer.run(*texts):
            pass
    assert caught.value.field == field
    assert servicer.running == set()
