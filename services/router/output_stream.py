"""Reads the stream in which a worker sends the outputs of all its decodes for this router."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import defaultdict
from typing import Any, Protocol

import grpc

from quire.protos import worker_pb2, worker_pb2_grpc
from quire.rpc.closed_channel import ChannelClosedError, closed_channel_errors
from quire.services.router.answer_part import AnswerPart, part_of_output
from quire.services.server.log import get_logger

_log = get_logger("router")


class Connection(Protocol):
    """A connection to a worker."""

    stub: worker_pb2_grpc.WorkerServiceStub

    async def check(self, call: Any) -> None:
        """Return once the call has reached the worker that proved its identity, or raise an AioRpcError."""


class Receiver(Protocol):
    """Takes what comes for one decode."""

    def receive(self, part: AnswerPart) -> None:
        """Take what the decode has added to an answer."""

    def lose(self, error: grpc.aio.AioRpcError) -> None:
        """Learn that no more outputs will come."""


class OutputStream:
    """The outputs of all decodes that one connection has called.

    Without it, each token of each request would be a message in a call of its own, and the cost of a message
    is many times that of a token.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receivers: dict[int, Receiver] = {}
        self._channels = itertools.count()
        self._stream_id = ""
        self._is_open = False
        self._reading: asyncio.Task[None] | None = None

    def subscribe(self, receiver: Receiver) -> worker_pb2.OutputChannel | None:
        """Return a channel whose outputs go to the receiver, or None if the stream is not open yet.

        The first call begins to open the stream; so does the first one after it has ended.
        """
        if self._reading is None or self._reading.done():
            self._stream_id = secrets.token_hex(16)
            self._reading = asyncio.create_task(self._read())
        if not self._is_open:
            return None
        channel = next(self._channels) % 2**32
        self._receivers[channel] = receiver
        return worker_pb2.OutputChannel(stream_id=self._stream_id, channel=channel)

    def unsubscribe(self, channel: worker_pb2.OutputChannel) -> None:
        """Ignore from now on what comes in a channel."""
        if channel.stream_id == self._stream_id:
            self._receivers.pop(channel.channel, None)

    async def _read(self) -> None:
        request = worker_pb2.StreamOutputsRequest(stream_id=self._stream_id)
        error = stream_ended()
        try:
            with closed_channel_errors():
                call = self._connection.stub.StreamOutputs(request)
                await self._connection.check(call)
                async for message in call:
                    self._is_open = True
                    self._receive(message)
        except grpc.aio.AioRpcError as failure:
            error = failure
        except ChannelClosedError:
            pass
        finally:
            self._is_open = False
            receivers, self._receivers = self._receivers, {}
            _log.debug("output_stream_ended", requests=len(receivers), code=error.code().name)
            for receiver in receivers.values():
                receiver.lose(error)

    def _receive(self, message: Any) -> None:
        receivers = self._receivers
        token_ids: defaultdict[int, list[int]] = defaultdict(list)
        # A slice copies a repeated field at once; its iterator makes a call for each member.
        for channel, token_id in zip(message.channels[:], message.token_ids[:], strict=True):
            token_ids[channel].append(token_id)
        for channel, its_token_ids in token_ids.items():
            if (receiver := receivers.get(channel)) is not None:
                receiver.receive(AnswerPart(its_token_ids))
        for other in message.others:
            if (receiver := receivers.get(other.channel)) is not None:
                receiver.receive(part_of_output(other.output))


def stream_ended() -> grpc.aio.AioRpcError:
    """Return the error, with status UNAVAILABLE, of a stream that the worker has ended without an error."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the worker has ended its stream of outputs", ""
    )
