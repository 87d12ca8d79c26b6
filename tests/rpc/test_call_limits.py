"""Clients that stop reading, or read too slowly: their calls end, and what they held is free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from quire.protos import inference_pb2 as pb
from quire.protos import inference_pb2_grpc as pb_grpc
from quire.rpc import ended_calls
from quire.rpc.ended_calls import end_call, end_of
from quire.rpc.errors import Aborted, Unavailable
from quire.rpc.server import GrpcServer, Service, grpc_server
from tests.testing.rpc_errors import error_of
from tests.testing.until import until

NAME = "quire.v1.GenerationService"
# A window so small that the first answers fill it.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
TEXT = "x" * (1 << 18)


class Servicer(pb_grpc.GenerationServiceServicer):
    """Answers without end, and at length."""

    def __init__(self) -> None:
        self.num_running = 0
        self.has_begun, self.has_ended = asyncio.Event(), asyncio.Event()
        self.tasks: list[asyncio.Task[Any]] = []

    async def Detokenize(self, request: Any, context: Any) -> pb.DetokenizeResponse:
        self.has_begun.set()
        return pb.DetokenizeResponse(text=TEXT)

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        self.num_running += 1
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        try:
            while True:
                self.has_begun.set()
                yield pb.GenerateStreamResponse(text=TEXT)
        finally:
            self.num_running -= 1
            self.has_ended.set()

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=[7])


def num_open_calls() -> int:
    """Return how many calls gRPC holds: each has a task that waits for its end."""
    tasks = asyncio.all_tasks()
    return sum(getattr(task.get_coro(), "__qualname__", "") == "_schedule_rpc_coro" for task in tasks)


async def all_ended(server: GrpcServer) -> None:
    """Wait until gRPC holds no call but the one that shows that the server still answers."""
    await until(lambda: not num_open_calls())
    async with grpc.aio.insecure_channel(server.address) as channel:
        answer = await pb_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(), timeout=10)
    assert list(answer.token_ids) == [7]


async def all_wait_for_a_reader(servicer: Servicer) -> None:
    """Wait until every stream has a message that its client must read first."""
    await until(lambda: all(end_of(task).is_sending for task in servicer.tasks))


@pytest.fixture
def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def limits() -> dict[str, float]:
    return {"read_seconds": 0.2}


@pytest.fixture
async def server(servicer: Servicer, limits: dict[str, float]) -> AsyncIterator[GrpcServer]:
    services = [Service(pb_grpc.add_GenerationServiceServicer_to_server, servicer, NAME)]
    options: Any = {"registry": CollectorRegistry(), "grace_seconds": 0, **limits}
    async with grpc_server(services, **options) as running:
        yield running


@pytest.fixture
async def narrow(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address, options=NARROW) as channel:
        yield channel


async def read(call: Any) -> grpc.StatusCode:
    """Read a call to its end and return its status."""
    return (await error_of(call)).code()


@pytest.mark.parametrize("method", ["GenerateStream", "Detokenize"])
async def test_calls_that_no_client_reads_end(
    server: GrpcServer, servicer: Servicer, narrow: Any, method: str
) -> None:
    calls = [narrow.unary_stream(f"/{NAME}/{method}")(b"") for _ in range(8)]
    await servicer.has_begun.wait()
    await all_ended(server)
    assert servicer.num_running == 0
    assert {await read(call) for call in calls} == {grpc.StatusCode.CANCELLED}


async def test_a_client_that_stops_reading_later_gets_the_same_time_for_its_message(
    server: GrpcServer, servicer: Servicer, narrow: grpc.aio.Channel
) -> None:
    call = pb_grpc.GenerationServiceStub(narrow).GenerateStream(pb.GenerateStreamRequest())
    loop = asyncio.get_running_loop()
    # It reads for several times as long as it may take for one message.
    until = loop.time() + 1
    while loop.time() < until:
        assert (await call.read()).text == TEXT
    assert servicer.num_running == 1
    await all_ended(server)
    assert servicer.num_running == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("limits", [{"read_seconds": 60.0, "call_seconds": 0.3}])
async def test_a_call_that_is_always_read_ends_after_its_time(
    server: GrpcServer, servicer: Servicer, narrow: grpc.aio.Channel
) -> None:
    call = pb_grpc.GenerationServiceStub(narrow).GenerateStream(pb.GenerateStreamRequest())
    reading = asyncio.create_task(read(call))
    await servicer.has_ended.wait()
    await all_ended(server)
    assert servicer.num_running == 0
    assert await reading is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize("limits", [{"read_seconds": 60.0}])
async def test_a_call_that_is_ended_while_a_message_is_sent_gets_its_status(
    server: GrpcServer, servicer: Servicer, narrow: Any
) -> None:
    call = narrow.unary_stream(f"/{NAME}/GenerateStream")(b"")
    await servicer.has_begun.wait()
    await all_wait_for_a_reader(servicer)
    end_call(servicer.tasks[0], Aborted("it was ended"))
    end_call(servicer.tasks[0], Unavailable("a later error"))
    assert await read(call) is grpc.StatusCode.ABORTED
    assert await call.details() == "it was ended"
    assert servicer.num_running == 0


@pytest.mark.parametrize("limits", [{"read_seconds": 60.0}])
async def test_an_ended_call_that_no_client_reads_is_dropped(
    server: GrpcServer, servicer: Servicer, narrow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended_calls, "ENDED_READ_SECONDS", 0.2)
    call = narrow.unary_stream(f"/{NAME}/GenerateStream")(b"")
    await servicer.has_begun.wait()
    await all_wait_for_a_reader(servicer)
    end_call(servicer.tasks[0], Aborted("it was ended"))
    await all_ended(server)
    assert servicer.num_running == 0
    assert await read(call) is grpc.StatusCode.CANCELLED


async def test_a_whole_answer_that_is_read_arrives(narrow: grpc.aio.Channel) -> None:
    stub = pb_grpc.GenerationServiceStub(narrow)
    answers = await asyncio.gather(*(stub.Detokenize(pb.DetokenizeRequest(), timeout=10) for _ in range(4)))
    assert [len(answer.text) for answer in answers] == [len(TEXT)] * 4
