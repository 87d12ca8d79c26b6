"""Sends the outputs of many decodes to their router in one stream, in few messages.

A message costs the worker, the router and the client much more than a token. A stream therefore pauses after
each message, and pauses longer if it carries more decodes. The first output of a sequence and the last one do
not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from quire.engine.sequences.sequence import SequenceUpdate
from quire.protos import worker_pb2
from quire.rpc.errors import DRAINING, Aborted, AlreadyExists, InvalidArgument, Unavailable
from quire.services.worker.requests.convert import converting, outputs_to_proto
from quire.services.worker.requests.updates import Updates, checked

REST_SECONDS_PER_DECODE = 0.01
TOKENS_PER_REPORT = 64
"""After this many tokens, a beam search that has no outputs yet reports its number of tokens."""
MAX_ID_CHARS = 64


class StreamedDecode:
    """A decode whose updates are sent in a stream."""

    def __init__(self, stream: OutputStream, channel: int, num_sequences: int) -> None:
        self.channel = channel
        self._stream = stream
        self._num_left = num_sequences
        self._begun: set[int] = set()
        """Indexes of the sequences that have an output."""
        self._token_ids: list[int] = []
        """Waiting tokens of the first sequence that came alone; they are sent before ``_others``."""
        self._others: list[worker_pb2.SequenceOutput] = []
        self._num_reported = 0
        self._error: Exception | None = None
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, update: SequenceUpdate | Exception) -> None:
        """Send an update. An exception ends the decode after all earlier updates were sent."""
        try:
            self._add(checked(update))
        except Exception as error:
            self._error = self._error or error
            self._stream.send(self, at_once=True)

    def _add(self, update: SequenceUpdate) -> None:
        sequence, tokens, is_last = update.sequence, update.tokens, update.status.is_finished
        if not tokens and not is_last:
            if sequence.params.beam is not None:
                self._report(sequence.tally.num_generated_tokens)
            return
        index = sequence.index
        at_once, is_waiting = is_last or index not in self._begun, bool(self._token_ids or self._others)
        has_more = is_last or index or len(tokens) > 1 or tokens[0].logprobs or update.num_accepted_tokens
        if has_more or self._others:
            with converting():
                self._others += outputs_to_proto([update])
        else:
            self._token_ids.append(tokens[0].token_id)
        if is_last:
            # A beam search returns all answers at once, and there may be fewer than its beams.
            self._num_left = 0 if sequence.params.beam is not None else self._num_left - 1
        if at_once or not is_waiting:
            self._begun.add(index)
            self._stream.send(self, at_once=at_once)

    def _report(self, num_generated_tokens: int) -> None:
        if num_generated_tokens - self._num_reported >= TOKENS_PER_REPORT:
            self._num_reported = num_generated_tokens
            self._others.append(worker_pb2.SequenceOutput(num_generated_tokens=num_generated_tokens))
            self._stream.send(self, at_once=False)

    def move_to(self, message: worker_pb2.StreamOutputsResponse) -> None:
        """Move the waiting outputs into a message."""
        message.channels.extend([self.channel] * len(self._token_ids))
        message.token_ids.extend(self._token_ids)
        for output in self._others:
            message.others.add(channel=self.channel, output=output)
        self._token_ids, self._others = [], []

    def sent(self) -> None:
        """Record that gRPC has accepted a message, and end if nothing remains to be sent."""
        if self._token_ids or self._others:
            return
        if self._error is not None:
            self.end_early()
        elif not self._num_left and not self._end.done():
            self._end.set_result(None)

    def end_early(self) -> None:
        """End the decode now: with its own error, or because its stream has ended."""
        if not self._end.done():
            self._end.set_exception(self._error or _stream_ended())

    async def ended(self) -> None:
        """Wait until all of the decode's sequences have ended and gRPC has accepted their outputs.

        Raises:
            Exception: the decode has failed, or the stream has ended.
        """
        try:
            await self._end
        finally:
            self._stream.drop(self)


class OutputStream:
    """The stream with the outputs of all decodes that name it.

    Args:
        max_rest_seconds: longest time between two messages that are not urgent.
    """

    def __init__(self, max_rest_seconds: float) -> None:
        self._max_rest_seconds = max_rest_seconds
        self._decodes: dict[int, StreamedDecode] = {}
        self._waiting: dict[StreamedDecode, None] = {}
        """The decodes that have something to send, in order."""
        self._urgent: dict[StreamedDecode, None] = {}
        self._is_resting = False
        self._has_ended = False
        self._wake = asyncio.Event()

    def add(self, channel: int, num_sequences: int, updates: Updates) -> StreamedDecode:
        """Send the waiting and all later updates of a decode, unless the stream has ended.

        Raises:
            AlreadyExists: the channel is in use.
        """
        if channel in self._decodes:
            raise AlreadyExists(f"channel {channel} of this stream of outputs is in use")
        decode = self._decodes[channel] = StreamedDecode(self, channel, num_sequences)
        updates.forward_to(decode.put)
        if self._has_ended:
            decode.end_early()
        return decode

    def drop(self, decode: StreamedDecode) -> None:
        """Stop sending the outputs of a decode."""
        self._decodes.pop(decode.channel, None)
        self._waiting.pop(decode, None)
        self._urgent.pop(decode, None)

    def send(self, decode: StreamedDecode, *, at_once: bool) -> None:
        """Send the waiting outputs of a decode, immediately or after the pause."""
        self._waiting[decode] = None
        if at_once:
            self._urgent[decode] = None
        if at_once or not self._is_resting:
            self._wake.set()

    async def messages(self) -> AsyncGenerator[worker_pb2.StreamOutputsResponse, None]:
        """Yield messages until the stream is ended. The first message is empty."""
        yield worker_pb2.StreamOutputsResponse()
        while not self._has_ended:
            await self._wake.wait()
            self._wake.clear()
            decodes = list(self._urgent if self._is_resting else self._waiting)
            if not decodes:
                continue
            if not self._is_resting:
                self._rest()
            message = worker_pb2.StreamOutputsResponse()
            for decode in decodes:
                self._waiting.pop(decode)
                self._urgent.pop(decode, None)
                decode.move_to(message)
            yield message
            for decode in decodes:
                decode.sent()

    def _rest(self) -> None:
        seconds = min(self._max_rest_seconds, REST_SECONDS_PER_DECODE * len(self._decodes))
        if seconds:
            self._is_resting = True
            asyncio.get_running_loop().call_later(seconds, self._end_rest)

    def _end_rest(self) -> None:
        self._is_resting = False
        if self._waiting:
            self._wake.set()

    def end(self) -> None:
        """End the stream and its decodes: nothing more reaches the router."""
        self._has_ended = True
        self._wake.set()
        for decode in list(self._decodes.values()):
            decode.end_early()


class OutputStreams:
    """The open streams of a worker, by the ids that routers chose for them."""

    def __init__(self, max_rest_seconds: float) -> None:
        self._max_rest_seconds = max_rest_seconds
        self._streams: dict[str, OutputStream] = {}
        self._is_closed = False

    def find(self, stream_id: str) -> OutputStream:
        """Return an open stream.

        Raises:
            Aborted: no stream of this id is open.
        """
        if (stream := self._streams.get(stream_id)) is None:
            raise _stream_ended()
        return stream

    async def serve(self, stream_id: str) -> AsyncGenerator[worker_pb2.StreamOutputsResponse, None]:
        """Open a stream and yield its messages; when the caller stops reading, its decodes end.

        Raises:
            InvalidArgument: the id is empty or too long.
            AlreadyExists: a stream of this id is open.
            Unavailable: the worker is stopping.
        """
        if not 0 < len(stream_id) <= MAX_ID_CHARS:
            raise InvalidArgument(
                "stream_id", f"must have 1 to {MAX_ID_CHARS} characters; got {len(stream_id)}"
            )
        if self._is_closed:
            raise Unavailable("this worker is stopping; use another", reason=DRAINING)
        if stream_id in self._streams:
            raise AlreadyExists("a stream of outputs of this id is open")
        stream = self._streams[stream_id] = OutputStream(self._max_rest_seconds)
        try:
            async for message in stream.messages():
                yield message
        finally:
            del self._streams[stream_id]
            stream.end()

    def close(self) -> None:
        """End all streams, and refuse new ones, since an open stream would delay the end of the process."""
        self._is_closed = True
        for stream in self._streams.values():
            stream.end()


def _stream_ended() -> Aborted:
    return Aborted("the stream of outputs has ended", reason="OUTPUT_STREAM_ENDED")
