"""The router's end of a worker's stream of outputs: whose output is whose, and what a lost stream ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import Mock

import grpc.aio
import pytest

from quire.protos import worker_pb2, worker_pb2_grpc
from quire.services.router.workers import output_reader
from quire.services.router.workers.answer_part import AnswerPart
from quire.services.router.workers.output_reader import OutputReader
from tests.testing.rpc_errors import rpc_error


class Receiver:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.received: list[list[AnswerPart]] = []
        self.token_ids: list[int] = []
        self.errors: list[grpc.aio.AioRpcError] = []

    def __call__(self, outputs: list[AnswerPart] | grpc.aio.AioRpcError) -> None:
        if isinstance(outputs, grpc.aio.AioRpcError):
            self.errors.append(outputs)
            return
        self.received.append(outputs)
        for part in outputs:
            self.token_ids += part.token_ids


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


@asynccontextmanager
async def opened(connection: Connection) -> AsyncIterator[OutputReader]:
    """Yield a stream that the worker has opened."""
    stream = OutputReader(connection)
    stream.keep_open(Mock())
    await connection.send(worker_pb2.StreamOutputsResponse())
    assert await stream.opened(0)
    yield stream
    stream.close()


def other(channel: int, token_id: int) -> worker_pb2.ChannelOutput:
    tokens = [worker_pb2.SampledToken(token_id=token_id)]
    return worker_pb2.ChannelOutput(channel=channel, output=worker_pb2.SequenceOutput(tokens=tokens))


async def test_a_stream_is_open_after_the_first_message_of_the_worker() -> None:
    connection, on_open = Connection(), Mock()
    stream = OutputReader(connection)
    stream.keep_open(on_open)
    assert not await stream.opened(0)
    on_open.assert_not_called()
    await connection.send(worker_pb2.StreamOutputsResponse())
    assert stream.is_open
    on_open.assert_called_once_with()
    stream.close()


async def test_each_decode_gets_its_own_outputs_until_it_has_unsubscribed() -> None:
    connection, receivers = Connection(), [Receiver(), Receiver()]
    async with opened(connection) as stream:
        first, second = map(stream.subscribe, receivers)
        assert [first.stream_id, second.stream_id] == 2 * connection.stream_ids
        assert first.channel != second.channel
        channels = [first.channel, second.channel, first.channel, 99]
        await connection.send(
            worker_pb2.StreamOutputsResponse(
                channels=channels,
                token_ids=[5, 6, 7, 1],
                others=[other(first.channel, 8), other(second.channel, 9), other(first.channel, 10)],
            )
        )
        assert [receiver.token_ids for receiver in receivers] == [[5, 7, 8, 10], [6, 9]]
        assert receivers[0].received[-1] == [AnswerPart([8]), AnswerPart([10])], (
            "the answers of a beam search"
        )
        stream.unsubscribe(first)
        await connection.send(worker_pb2.StreamOutputsResponse(channels=channels, token_ids=[1, 2, 3, 4]))
        assert [receiver.token_ids for receiver in receivers] == [[5, 7, 8, 10], [6, 9, 2]]


@pytest.mark.parametrize("end", [rpc_error(grpc.StatusCode.UNAVAILABLE), None])
async def test_a_lost_stream_ends_its_decodes_and_is_opened_again(
    end: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_reader, "REOPEN_SECONDS", 0)
    connection, receiver, late, again = Connection(), Receiver(), Receiver(), Receiver()
    async with opened(connection) as stream:
        old = stream.subscribe(receiver)
        await connection.send(end)
        stream.subscribe(late)
        for each in (receiver, late):
            assert [error.code() for error in each.errors] == [grpc.StatusCode.UNAVAILABLE]
        await connection.send(worker_pb2.StreamOutputsResponse())
        new = stream.subscribe(again)
        assert new.stream_id != old.stream_id
        stream.unsubscribe(old)
        await connection.send(worker_pb2.StreamOutputsResponse(channels=[new.channel], token_ids=[5]))
        assert again.token_ids == [5]


async def test_a_closed_channel_ends_the_stream_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_reader, "REOPEN_SECONDS", 0)
    connection, receiver = Connection(), Receiver()
    async with opened(connection) as stream:
        stream.subscribe(receiver)
        await connection.send(grpc.aio.UsageError("Channel is closed."))
        assert len(receiver.errors) == len(connection.stream_ids) == 1
        assert not stream.is_open


async def test_outputs_of_a_stranger_are_not_read() -> None:
    connection = Connection()
    connection.stranger = rpc_error(grpc.StatusCode.UNAVAILABLE)
    stream = OutputReader(connection)
    stream.keep_open(Mock())
    await connection.send(worker_pb2.StreamOutputsResponse())
    assert not stream.is_open
    stream.close()
