"""Streams that a client reads on after its connection was lost: what it gets, and when the answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry

from quire.rpc.errors import InvalidArgument, NotFound, Unavailable
from quire.services.router.grpc.request_memory import UNCOUNTED_BYTES, RequestMemory
from quire.services.router.http.shared import resumable
from quire.services.router.http.shared.bodies import ADD_BYTES, BODY_ACCOUNT, REQUEST_ID, TENANT
from quire.services.router.http.shared.resumable import ResumableAnswers
from quire.services.router.metrics.metrics import RouterMetrics
from quire.services.router.tenants.api_keys import Tenant
from tests.testing.until import until

WAIT_SECONDS = 10.0
EVENTS = [b"data: %d\n\n" % number for number in range(7)]
WHOLE = b"".join(EVENTS)
ERROR = b'data: {"error":{"message":"lost","type":"overloaded_error","param":null,"code":"unavailable"}}\n\n'


class Model:
    """Writes events, each as soon as the test allows it.

    Attributes:
        answers: what the server keeps.
        allowed: number of events that may be written.
    """

    def __init__(self, memory: RequestMemory, events: list[bytes]) -> None:
        self.answers = ResumableAnswers()
        self.memory = memory
        self.events = events
        self.allowed = len(events)
        self.error: Exception | None = None
        self.num_written = 0
        self.num_running = 0
        self._more = asyncio.Event()

    def allow(self, number: int) -> None:
        self.allowed = number
        self._more.set()

    async def write(self) -> AsyncGenerator[bytes, None]:
        self.num_running += 1
        try:
            for at, event in enumerate(self.events):
                while at >= self.allowed:
                    self._more.clear()
                    await self._more.wait()
                self.num_written = at + 1
                yield event
            if self.error is not None:
                raise self.error
        finally:
            self.num_running -= 1

    async def handle(self, request: web.Request) -> web.StreamResponse:
        request[TENANT] = Tenant(request.query.get("tenant", ""))
        name = request.match_info["name"]
        try:
            if "after" in request.query:
                return await self.answers.resume(request, name, request.query["after"], "after")
            request[BODY_ACCOUNT] = ExitStack()
            request[ADD_BYTES] = request[BODY_ACCOUNT].enter_context(self.memory.request())
            ids = "ids" in request.query
            request[REQUEST_ID] = name
            return await self.answers.begin(request, self.write(), lambda error: error.body, has_ids=ids)
        except (NotFound, InvalidArgument, Unavailable) as error:
            return web.Response(status={NotFound: 404, InvalidArgument: 400}.get(type(error), 503))


@asynccontextmanager
async def serving(events: list[bytes] = EVENTS, max_bytes: int = 1 << 30) -> AsyncIterator[tuple[Model, Any]]:
    """Yield a model and the client of a server in front of it; at the end, nothing of it is left."""
    memory = RequestMemory(max_bytes, RouterMetrics(CollectorRegistry()))
    model = Model(memory, events)
    app = web.Application()
    app.on_cleanup.append(model.answers.close)
    app.router.add_get("/{name}", model.handle)
    server = TestServer(app)
    await server.start_server(shutdown_timeout=0.1)
    async with asyncio.timeout(60), TestClient(server) as client:
        yield model, client
    assert model.num_running == 0
    assert memory.num_bytes == 0


async def read(response: ClientResponse) -> bytes:
    return await asyncio.wait_for(response.read(), WAIT_SECONDS)


@pytest.mark.parametrize("num_sent", range(1, len(EVENTS) + 1))
async def test_both_parts_are_the_whole_stream_after_a_loss_at_any_event(num_sent: int) -> None:
    async with serving() as (model, client):
        for last in range(-1, num_sent):
            model.allow(num_sent)
            first = await client.get("/a")
            begun = await first.content.readexactly(sum(map(len, EVENTS[:num_sent])))
            first.close()
            rest = await client.get("/a", params={"after": last})
            model.allow(len(EVENTS))
            assert begun[: sum(map(len, EVENTS[: last + 1]))] + await read(rest) == WHOLE


async def test_a_connection_may_be_lost_after_every_event() -> None:
    async with serving() as (model, client):
        model.allow(1)
        response = await client.get("/a")
        for last, event in enumerate(EVENTS):
            model.allow(last + 1)
            assert await response.content.readexactly(len(event)) == event
            response.close()
            response = await client.get("/a", params={"after": last})
        assert await read(response) == b""


async def test_the_answer_goes_on_without_a_reader_and_its_end_is_kept() -> None:
    async with serving() as (model, client):
        model.allow(1)
        first = await client.get("/a")
        assert await first.content.readexactly(len(EVENTS[0])) == EVENTS[0]
        first.close()
        await until(lambda: model.answers._kept[""]["a"]._reader is None)
        model.allow(len(EVENTS))
        await until(lambda: model.num_running == 0)
        for last in (0, 3, len(EVENTS) - 1):
            assert await read(await client.get("/a", params={"after": last})) == b"".join(EVENTS[last + 1 :])


async def test_a_reader_whose_line_is_dead_is_replaced() -> None:
    async with serving() as (model, client):
        model.allow(2)
        first = await client.get("/a")
        await first.content.readexactly(len(EVENTS[0]) * 2)
        second = await client.get("/a", params={"after": 0})
        assert await second.content.readexactly(len(EVENTS[1])) == EVENTS[1]
        with pytest.raises(ClientPayloadError):
            await read(first)
        model.allow(len(EVENTS))
        assert await read(second) == b"".join(EVENTS[2:])


async def test_a_generation_waits_for_a_slow_reader_but_not_for_one_that_left() -> None:
    events = [b"data: %s\n\n" % (b"%d" % number * 50_000) for number in range(200)]
    async with serving(events) as (model, client):
        first = await client.get("/a")
        kept = model.answers._kept[""]["a"]
        await until(lambda: kept._num_bytes > resumable.MAX_ANSWER_BYTES)
        assert model.num_written < len(events)
        assert kept._num_bytes <= resumable.MAX_ANSWER_BYTES + len(events[-1])
        first.close()
        await until(lambda: model.num_running == 0)
        assert kept._num_bytes <= resumable.MAX_ANSWER_BYTES
        rest = await client.get("/a", params={"after": kept.first - 1})
        assert await read(rest) == b"".join(events[kept.first :])


async def test_an_answer_without_a_reader_ends_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "GRACE_SECONDS", 0.05)
    async with serving() as (model, client):
        model.allow(1)
        first = await client.get("/a")
        await first.content.readexactly(len(EVENTS[0]))
        assert model.num_running == 1
        first.close()
        await until(lambda: model.num_running == 0)
        assert not model.answers._kept[""]
        assert (await client.get("/a", params={"after": 0})).status == 404


async def test_a_finished_answer_is_forgotten_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "GRACE_SECONDS", 0.05)
    async with serving() as (model, client):
        assert await read(await client.get("/a")) == WHOLE
        await until(lambda: not model.answers._kept[""])


async def test_only_the_tenant_of_an_answer_can_resume_it() -> None:
    async with serving() as (_, client):
        assert await read(await client.get("/a", params={"tenant": "me"})) == WHOLE
        assert (await client.get("/a", params={"after": 0, "tenant": "you"})).status == 404
        assert (await client.get("/b", params={"after": 0, "tenant": "me"})).status == 404
        mine = await client.get("/a", params={"after": 0, "tenant": "me"})
        assert await read(mine) == b"".join(EVENTS[1:])


@pytest.mark.parametrize("last", ["", "-2", "x", "1.0", "٣"])
async def test_the_number_of_the_last_event_is_a_number(last: str) -> None:
    async with serving() as (_, client):
        assert (await client.get("/a", params={"after": last})).status == 400


async def test_a_tenant_has_at_most_so_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_ANSWERS", 2)
    async with serving() as (model, client):
        model.allow(1)
        responses = {}
        for name, tenant in (("other", "you"), ("a", "me"), ("b", "me"), ("c", "me")):
            responses[name] = await client.get(f"/{name}", params={"tenant": tenant})
        kept = model.answers._kept
        assert (list(kept["you"]), list(kept["me"])) == (["other"], ["b", "c"])
        model.allow(len(EVENTS))
        # The oldest one has been forgotten, but its reader gets all of it.
        assert [await read(response) for response in responses.values()] == [WHOLE] * 4


async def test_a_forgotten_answer_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_ANSWERS", 1)
    monkeypatch.setattr(resumable, "GRACE_SECONDS", 1e6)
    async with serving() as (model, client):
        model.allow(1)
        first, second = await client.get("/a"), await client.get("/b")
        first.close()
        await until(lambda: model.num_running == 1)
        second.close()
        await until(lambda: model.answers._kept[""]["b"]._reader is None)
        assert model.num_running == 1
        third = await client.get("/c")
        # The answer without a reader ends as soon as it is forgotten.
        await until(lambda: model.num_running == 1 and list(model.answers._kept[""]) == ["c"])
        third.close()


async def test_a_request_with_the_same_id_replaces_an_answer() -> None:
    async with serving() as (model, client):
        model.allow(1)
        first = await client.get("/a")
        first.close()
        await until(lambda: model.answers._kept[""]["a"]._reader is None)
        second = await client.get("/a")
        await until(lambda: model.num_running == 1)
        model.allow(len(EVENTS))
        assert await read(second) == WHOLE
        assert await read(await client.get("/a", params={"after": 2})) == b"".join(EVENTS[3:])


async def test_only_the_newest_bytes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_ANSWER_BYTES", 3 * len(EVENTS[0]))
    async with serving() as (_, client):
        assert await read(await client.get("/a")) == WHOLE
        assert (await client.get("/a", params={"after": 2})).status == 404
        assert await read(await client.get("/a", params={"after": 3})) == b"".join(EVENTS[4:])


async def test_kept_bytes_count_as_memory_of_requests_and_give_way() -> None:
    events = [b"x" * 20_000] * 6
    async with serving(events, max_bytes=30_000) as (model, client):
        model.allow(4)
        response = await client.get("/a")
        await response.content.readexactly(4 * 20_000)
        assert model.memory.num_bytes == 4 * 20_000 - UNCOUNTED_BYTES
        model.allow(len(events))
        assert await read(response) == b"".join(events[4:])
        assert model.memory.num_bytes == 0
        assert (await client.get("/a", params={"after": 4})).status == 404


async def test_an_error_is_the_same_last_event_for_each_reader() -> None:
    async with serving() as (model, client):
        model.error = Unavailable("lost")
        assert await read(await client.get("/a")) == WHOLE + ERROR
        last = {"after": len(EVENTS) - 1}
        assert await read(await client.get("/a", params=last)) == ERROR


async def test_an_error_before_the_first_event_is_a_status() -> None:
    async with serving([]) as (model, client):
        model.error = Unavailable("full")
        assert (await client.get("/a")).status == 503


async def test_events_have_ids_if_they_are_asked_for() -> None:
    async with serving() as (_, client):
        expected = [b"id: a:%d\n" % at + event for at, event in enumerate(EVENTS)]
        assert await read(await client.get("/a", params={"ids": ""})) == b"".join(expected)
        assert await read(await client.get("/a", params={"after": 1})) == b"".join(expected[2:])


async def test_the_end_of_the_server_ends_all_answers() -> None:
    async with serving() as (model, client):
        model.allow(1)
        for name in "ab":
            response = await client.get(f"/{name}")
            await response.content.readexactly(len(EVENTS[0]))
        response.close()
        assert model.num_running == 2
