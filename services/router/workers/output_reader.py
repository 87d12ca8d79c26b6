"""Reads the stream in which a worker sends the outputs of all its decodes for this router."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import grpc

from quire.protos import worker_pb2, worker_pb2_grpc
from quire.rpc.channels import ChannelClosedError, closed_channel_errors
from quire.services.router.workers.answer_part import AnswerPart, part_of_output
from quire.services.server.background import started
from quire.services.server.log import EventLogger

REOPEN_SECONDS = 0.2
"""Pause before a stream that has ended is opened again."""
ENDED_BY_WORKER = "the worker has ended its stream of outputs"
"""Details of the error if a stream ends without an error, as it does when its worker stops."""

_log = EventLogger("router")


class Connection(Protocol):
    """A connection to a worker."""

    stub: worker_pb2_grpc.WorkerServiceStub

    async def check(self, call: Any) -> None:
        """Return once the call has reached the worker that proved its identity, or raise an AioRpcError."""


Receive = Callable[[list[AnswerPart] | grpc.aio.AioRpcError], None]
"""Receives the parts that a decode has added to its answers, or the error after which no outputs follow."""


class OutputReader:
    """Reads the outputs of all decodes of one connection, in a call that is opened again when it ends.

    Without it, each token of each request would be a message in a separate call, and a message costs many
    times as much as a token.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receivers: dict[int, Receive] = {}
        self._channels = itertools.count()
        self._stream_id = ""
        self._open = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether decodes may name the stream."""
        return self._open.is_set()

    def keep_open(self, on_open: Callable[[], None]) -> None:
        """Open the stream now and whenever it has ended, until its connection is closed.

        Args:
            on_open: called each time that the stream has been opened.
        """
        self._reading = started(self._keep_open(on_open))

    async def opened(self, seconds: float) -> bool:
        """Wait until the stream is open, for some seconds at most; return whether it is."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._open.wait()
        return self.is_open

    def close(self) -> None:
        """End the stream."""
        if self._reading is not None:
            self._reading.cancel()

    def subscribe(self, receive: Receive) -> worker_pb2.OutputChannel:
        """Return a channel whose outputs go to ``receive``; an error goes there if the stream is closed."""
        channel = next(self._channels) % 2**32
        if self.is_open:
            self._receivers[channel] = receive
        else:
            receive(unavailable("failed to connect: the worker's stream of outputs is not open"))
        return worker_pb2.OutputChannel(stream_id=self._stream_id, channel=channel)

    def unsubscribe(self, channel: worker_pb2.OutputChannel) -> None:
        """Ignore all later outputs of a channel."""
        if channel.stream_id == self._stream_id:
            self._receivers.pop(channel.channel, None)

    async def _keep_open(self, on_open: Callable[[], None]) -> None:
        with suppress(ChannelClosedError):
            while True:
                await self._read(on_open)
                await asyncio.sleep(REOPEN_SECONDS)

    async def _read(self, on_open: Callable[[], None]) -> None:
        """Read the stream to its end.

        Raises:
            ChannelClosedError: the connection was closed.
        """
        self._stream_id = secrets.token_hex(16)
        request = worker_pb2.StreamOutputsRequest(stream_id=self._stream_id)
        error = unavailable(ENDED_BY_WORKER)
        try:
            with closed_channel_errors():
                call = self._connection.stub.StreamOutputs(request)
                await self._connection.check(call)
                async for message in call:
                    if not self.is_open:
                        self._open.set()
                        on_open()
                    self._receive(message)
        except grpc.aio.AioRpcError as failure:
            error = failure
        finally:
            self._open.clear()
            receivers, self._receivers = self._receivers, {}
            _log.debug("output_stream_ended", requests=len(receivers), code=error.code().name)
            for receive in receivers.values():
                receive(error)

    def _receive(self, message: Any) -> None:
        token_ids: defaultdict[int, list[int]] = defaultdict(list)
        # A slice copies a repeated field at once; its iterator makes a call for each member.
        for channel, token_id in zip(message.channels[:], message.token_ids[:], strict=True):
            token_ids[channel].append(token_id)
        for channel, its_token_ids in token_ids.items():
            self._pass_on(channel, [AnswerPart(its_token_ids)])
        others: defaultdict[int, list[AnswerPart]] = defaultdict(list)
        for other in message.others:
            others[other.channel].append(part_of_output(other.output))
        for channel, parts in others.items():
            self._pass_on(channel, parts)

    def _pass_on(self, channel: int, parts: list[AnswerPart]) -> None:
        if (receive := self._receivers.get(channel)) is not None:
            receive(parts)


def unavailable(details: str) -> grpc.aio.AioRpcError:
    """Return an error with status UNAVAILABLE, for a call that this process has ended or not begun."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details, "")
