"""Generates streamed answers apart from connections, so that a client can read on after it lost its own."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from contextlib import aclosing

from aiohttp import web

from quire.rpc.errors import InvalidArgument, NotFound, ResourceExhausted
from quire.services.router.http.shared.bodies import ADD_BYTES, BODY_ACCOUNT, REQUEST_ID, TENANT
from quire.services.router.http.shared.streams import Events, Failed, failure, send_events

GRACE_SECONDS = 10.0
"""Time for which an answer without a reader goes on and is kept; most clients connect again sooner."""
MAX_ANSWERS = 64
"""Most answers that are kept for a tenant; the next one takes the place of the oldest."""
MAX_ANSWER_BYTES = 512 << 10
"""Most bytes that are kept of an answer, in its newest events: about 2000 tokens."""


class _Answer:
    """An answer that is generated in a task, and sent to its newest reader.

    The request's body and the kept events count as memory. The generation waits for a slow reader.

    Args:
        kept: the tenant's answers by the ids of their requests, for as long as they are kept.
        has_ids: whether each event has an ``id:`` line, with the request's id and the event's number.
    """

    def __init__(
        self, request: web.Request, kept: dict[str, _Answer], events: Events, failed: Failed, *, has_ids: bool
    ) -> None:
        self._name, self._kept, self._failed, self._has_ids = request[REQUEST_ID], kept, failed, has_ids
        self._add_bytes, self._account = request[ADD_BYTES], request[BODY_ACCOUNT].pop_all()
        self._events: list[bytes] = []
        # Number of the first event that is kept, and of the next one for the reader.
        self.first = self._next = 0
        self._num_bytes, self._max_bytes = 0, MAX_ANSWER_BYTES
        self._reader: web.Request | None = None
        self._changed = asyncio.Event()
        self._expiry = asyncio.get_running_loop().call_later(GRACE_SECONDS, self.forget)
        self.task = asyncio.create_task(self._generate(events))
        self.task.add_done_callback(self._end)

    async def send(self, request: web.Request, number: int) -> web.StreamResponse:
        """Send the events from a number on; the connection of an earlier reader is closed."""
        self._expiry.cancel()
        if self._reader is not None and self._reader.transport is not None:
            self._reader.transport.abort()
        self._reader, self._next = request, number
        try:
            return await send_events(request, self._read(request), self._failed)
        finally:
            if self._reader is request:
                self._reader = None
                self._changed.set()
                seconds = GRACE_SECONDS if self._max_bytes else 0
                self._expiry = asyncio.get_running_loop().call_later(seconds, self.forget)

    def forget(self) -> None:
        """Stop keeping the answer; it goes on only if it has a reader."""
        self._expiry.cancel()
        if self._max_bytes:
            self._max_bytes = 0
            self._add_bytes(-self._num_bytes)
            del self._kept[self._name]
            self._trim()
            self.task.add_done_callback(lambda _: self._account.close())
        if self._reader is None:
            self.task.cancel()

    async def _generate(self, events: Events) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    self._append(event)
                    while self._reader is not None and self._num_bytes > self._max_bytes:
                        self._changed.clear()
                        await self._changed.wait()
        except Exception as error:
            if not self.first and not self._events:
                raise
            self._append(failure(error, self._failed))

    def _end(self, task: asyncio.Task[None]) -> None:
        self._changed.set()
        if not task.cancelled():
            # A reader may raise the error; if there is none, asyncio must not log it.
            task.exception()

    async def _read(self, reader: web.Request) -> Events:
        if self._next:
            # The client learns at once that the answer goes on, even if there is no new event yet.
            yield b""
        while self._reader is reader:
            if unread := self._events[self._next - self.first :]:
                self._next += len(unread)
                self._trim()
                self._changed.set()
                yield b"".join(unread)
            elif self.task.done():
                self.task.result()
                return
            else:
                self._changed.clear()
                await self._changed.wait()

    def _append(self, event: bytes) -> None:
        if self._has_ids:
            event = f"id: {self._name}:{self.first + len(self._events)}\n".encode() + event
        self._events.append(event)
        self._num_bytes += len(event)
        try:
            if self._max_bytes:
                self._add_bytes(len(event))
        except ResourceExhausted:
            self.forget()
        self._trim()
        self._changed.set()

    def _trim(self) -> None:
        """Drop the oldest events above the limit, but none that the reader has not got yet."""
        while self._num_bytes > self._max_bytes and (self._reader is None or self.first < self._next):
            num_bytes = len(self._events.pop(0))
            self.first += 1
            self._num_bytes -= num_bytes
            if self._max_bytes:
                self._add_bytes(-num_bytes)


class ResumableAnswers:
    """The answers that can be resumed, of each tenant by the ids of their requests."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, dict[str, _Answer]] = defaultdict(dict)
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(
        self, request: web.Request, events: Events, failed: Failed, *, has_ids: bool
    ) -> web.StreamResponse:
        """Begin to send an answer; it replaces an earlier one of a request with the same id."""
        kept, name = self._kept[request[TENANT].name], request[REQUEST_ID]
        if name in kept or len(kept) == MAX_ANSWERS:
            kept[name if name in kept else next(iter(kept))].forget()
        answer = kept[name] = _Answer(request, kept, events, failed, has_ids=has_ids)
        self._tasks.add(answer.task)
        answer.task.add_done_callback(self._tasks.discard)
        return await answer.send(request, 0)

    async def resume(self, request: web.Request, name: str, last: str, field: str) -> web.StreamResponse:
        """Send the events of an answer after the last one that arrived, whose number is ``last``; -1: all.

        Raises:
            InvalidArgument: ``last`` is no number; the error names the field.
            NotFound: the tenant has no such answer here, or the next event is no longer kept.
        """
        if not re.fullmatch(r"-1|[0-9]{1,9}", last):
            raise InvalidArgument(field, "must end with the number of the last event that arrived")
        answer = self._kept[request[TENANT].name].get(name)
        if answer is None or int(last) + 1 < answer.first:
            raise NotFound("no answer with this id is in flight here: send the whole request again")
        return await answer.send(request, int(last) + 1)

    async def close(self, app: web.Application) -> None:
        """End all answers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for answer in [answer for kept in self._kept.values() for answer in kept.values()]:
            answer.forget()


ANSWERS = web.AppKey("answers", ResumableAnswers)
"""Key under which the application stores the answers that can be resumed."""
