"""Runs the prompts of an HTTP request in the router, and sends server-sent events as messages arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from aiohttp import web
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.rpc.ended_calls import end_raised
from quire.rpc.errors import Internal, InvalidArgument, ServiceError
from quire.services.requests.validation import ValidRequest
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.shared.errors import AnthropicErrorBody, HttpError, from_service_error
from quire.services.router.http.shared.json_text import is_large, to_json, to_json_in_steps
from quire.services.router.outputs.merge import merged
from quire.services.router.tenants.api_keys import Headers, Tenant
from quire.services.server.background import in_background
from quire.services.server.log import EventLogger

KEEP_ALIVE_SECONDS = 15.0
"""Interval of keep-alive comments; proxies close a connection that is silent for a minute."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Otherwise nginx would buffer the events.
    "X-Accel-Buffering": "no",
}
Events = AsyncGenerator[bytes, None]
"""The bytes of events."""
Failed = Callable[[HttpError], BaseModel]
"""Returns the last event of a stream that fails."""
_log = EventLogger("http")


class TypedEvent(BaseModel):
    """An event whose type is also its name on the ``event:`` line."""

    type: str


_NAMED = TypedEvent, AnthropicErrorBody


async def run(
    servicer: GenerationServicer,
    tenant: Tenant,
    generations: Sequence[pb.Generation],
    headers: Headers,
    names: Sequence[Mapping[str, str]],
    checked: Callable[[ValidRequest], None] | None = None,
) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    """Serve a tenant's prompts, several at a time, and yield their messages; the first error ends them all.

    The answers of all prompts are numbered in one sequence: those of a prompt follow those of the last one.

    Args:
        names: for each prompt, the client's names of fields of ``quire.v1``; errors use these names.
        checked: is called for each prompt, as ``GenerationServicer.generate`` says.

    Raises:
        ServiceError: one of the prompts cannot be served or cannot be completed.
    """
    streams, first, places = [], 0, servicer.places(tenant, generations)
    for each, sent in zip(generations, names, strict=True):
        answers = servicer.generate(each, tenant, servicer.deadline(), headers, checked)
        streams.append(_numbered(first, answers, places, sent))
        first += max(1, each.sampling.n, each.sampling.beam.width)
    async with aclosing(merged(streams) if len(streams) > 1 else streams[0]) as messages:
        async for message in messages:
            yield message


async def _numbered(
    first: int,
    responses: AsyncGenerator[pb.GenerateStreamResponse, None],
    places: asyncio.Semaphore,
    names: Mapping[str, str],
) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
    async with places, aclosing(responses):
        try:
            async for response in responses:
                response.index += first
                yield response
        except InvalidArgument as error:
            raise error.renamed(names) from error


async def encoded(events: AsyncGenerator[BaseModel, None], end_of_stream: bytes) -> Events:
    """Yield the bytes of each event, and ``end_of_stream`` after the last one."""
    async with aclosing(events):
        async for event in events:
            if is_large(event):
                yield _framed(event, await asyncio.to_thread(to_json_in_steps, event))
            else:
                yield _framed(event, to_json(event))
    yield end_of_stream


async def send_events(request: web.Request, events: Events, failed: Failed) -> web.StreamResponse:
    """Send each encoded event as soon as it arrives.

    An error before anything has been sent is raised, so that the response gets its status. A later error is
    sent as the last event, which ``failed`` returns.
    """
    response = web.StreamResponse(headers=_HEADERS)
    async with aclosing(events):
        first = asyncio.create_task(_next(events))
        try:
            await asyncio.wait({first}, timeout=KEEP_ALIVE_SECONDS)
            if first.done():
                first.result()
            await response.prepare(request)
            async with in_background(_keep_alive(response)):
                await _send(response, first, events, failed)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    await response.write_eof()
    return response


def failure(error: Exception, failed: Failed) -> bytes:
    """Return the bytes of a stream's last event after an error; one that is a bug is logged."""
    if not isinstance(error, ServiceError):
        _log.error("stream_failed", exc_info=error)
        error = Internal("internal error; the server's log has the details")
    event = failed(from_service_error(error))
    return _framed(event, to_json(event))


async def _send(
    response: web.StreamResponse, first: asyncio.Task[bytes], events: Events, failed: Failed
) -> None:
    try:
        with end_raised():
            await response.write(await first)
            async for event in events:
                await response.write(event)
    except ConnectionError:
        raise
    except Exception as error:
        await response.write(failure(error, failed))


def _framed(event: BaseModel, encoded: bytes) -> bytes:
    name = b"event: " + event.type.encode() + b"\n" if isinstance(event, _NAMED) else b""
    return name + b"data: " + encoded + b"\n\n"


async def _next(events: Events) -> bytes:
    return await anext(events, b"")


async def _keep_alive(response: web.StreamResponse) -> None:
    """Send a comment every ``KEEP_ALIVE_SECONDS`` until the client has gone."""
    with suppress(ConnectionError):
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            await response.write(b": keep-alive\n\n")
