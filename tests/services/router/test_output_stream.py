"""The router's end of a worker's stream of outputs: whose output is whose, and what a lost stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import grpc.aio

from quire.protos import worker_pb2, worker_pb2_grpc
from quire.services.router.answer_part import AnswerPart
from quire.services.router.output_stream import OutputStream


class Receiver:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.errors: list[grpc.aio.AioRpcError] = []

    def receive(self, part: AnswerPart) -> None:
        self.token_ids += part.token_ids

    def lose(self, error: grpc.aio.AioRpcError) -> None:
        self.errors.append(error)


class Connection:
    """A connection whose worker sends what it is told."""

    def __init__(self) -> None:
        self.stub = cast(worker_pb2_grpc.WorkerServiceStub, self)
        self.stream_ids: list[str] = []
        self.stranger: grpc.aio.AioRpcError | None = None
        self._messages: asyncio.Queue[worker_pb2.StreamOutputsResponse | Exception | None] = asyncio.Queue()

    async def check(self, call: Any) -> None:
        if self.stranger is not None:
            raise self.stranger

    async def StreamOutputs(
        self, request: worker_pb2.StreamOutputsRequest
    ) -> AsyncIterator[worker_pb2.StreamOutputsResponse]:
        self.stream_ids.append(request.stream_id)
        while (message := await self._messages.get()) is not None:
            if isinstance(message, Exception):
                raise message
            yield message

    async def send(self, message: worker_pb2.StreamOutputsResponse | Exception | None) -> None:
        """Let the worker send a message, fail, or end the stream; return when the router has seen it."""
        self._messages.put_nowait(message)
        for _ in range(5):
            await asyncio.sleep(0)


def failure() -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "gone", "")


async def test_a_decode_names_the_stream_once_the_worker_has_opened_it() -> None:
    connection, receivers = Connection(), [Receiver(), Receiver()]
    stream = OutputStream(connection)
    assert stream.subscribe(Receiver()) is None
    await connection.send(worker_pb2.StreamOutputsResponse())
    first, second = map(stream.subscribe, receivers)
    assert first is not None
    assert second is not None
    assert [first.stream_id, second.stream_id] == 2 * connection.stream_ids
    assert first.channel != second.channel
    others = [
        worker_pb2.ChannelOutput(
            channel=first.channel,
            output=worker_pb2.SequenceOutput(tokens=[worker_pb2.SampledToken(token_id=8)]),
        )
    ]
    channels = [first.channel, second.channel, first.channel, 99]
    await connection.send(
        worker_pb2.StreamOutputsResponse(channels=channels, token_ids=[5, 6, 7, 1], others=others)
    )
    assert [receiver.token_ids for receiver in receivers] == [[5, 7, 8], [6]]
    stream.unsubscribe(first)
    await connection.send(worker_pb2.StreamOutputsResponse(channels=channels, token_ids=[1, 2, 3, 4]))
    assert [receiver.token_ids for receiver in receivers] == [[5, 7, 8], [6, 2]]
    await connection.send(None)


async def test_a_stream_that_is_lost_is_told_to_all_and_opened_again() -> None:
    for end in (failure(), None):
        connection, receiver = Connection(), Receiver()
        stream = OutputStream(connection)
        stream.subscribe(Receiver())
        await connection.send(worker_pb2.StreamOutputsResponse())
        old = stream.subscribe(receiver)
        assert old is not None
        await connection.send(end)
        assert [error.code() for error in receiver.errors] == [grpc.StatusCode.UNAVAILABLE]
        assert stream.subscribe(Receiver()) is None
        await connection.send(worker_pb2.StreamOutputsResponse())
        again = Receiver()
        new = stream.subscribe(again)
        assert new is not None
        assert new.stream_id != old.stream_id
        stream.unsubscribe(old)
        await connection.send(worker_pb2.StreamOutputsResponse(channels=[new.channel], token_ids=[5]))
        assert again.token_ids == [5]
        await connection.send(None)


async def test_outputs_of_a_stranger_are_not_read() -> None:
    connection = Connection()
    connection.stranger = failure()
    stream = OutputStream(connection)
    assert stream.subscribe(Receiver()) is None
    await connection.send(worker_pb2.StreamOutputsResponse())
    assert stream.subscribe(Receiver()) is None
    await connection.send(None)
