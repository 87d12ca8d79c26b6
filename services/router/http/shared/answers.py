"""Answers a request of any API, as one body or as events."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import ClassVar, Generic, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.requests.validation import ValidRequest
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.shared.bodies import (
    INLINE_BODY_BYTES,
    MAX_TOKENS,
    TENANT,
    read_body,
    request_id,
    response_in_thread,
)
from quire.services.router.http.shared.errors import HttpError
from quire.services.router.http.shared.fields import AnswerFields
from quire.services.router.http.shared.resumable import ANSWERS
from quire.services.router.http.shared.streams import encoded, run, send_events
from quire.services.router.outputs.answer_size import PromptLogprobs, all_of, check_answer_size

B = TypeVar("B", bound=AnswerFields)
Messages = AsyncGenerator[pb.GenerateStreamResponse, None]


class AnswerWriter(ABC, Generic[B]):
    """One request: what it asks of the model, and its answers as one body or as events.

    Args:
        name: the request's id.
        turn: lets requests with many logprobs be written one after another.
    """

    end_of_stream: ClassVar[bytes] = b""
    """Sent after the last event."""
    resumes: ClassVar[Literal["always", "asked", "never"]] = "never"
    """Which streams go on after a lost connection; a client asks for it with the header Last-Event-ID."""

    def __init__(self, body: B, model: ServedModel, name: str, turn: asyncio.Lock) -> None:
        self.body = body
        self._model = model
        self._name = name
        self._turn = turn

    @abstractmethod
    def generations(self) -> list[pb.Generation]:
        """Return the prompts.

        Raises:
            InvalidArgument: the body cannot be served; the error names the field.
        """

    @abstractmethod
    def names(self) -> list[dict[str, str]]:
        """Return, for each prompt, the client's names of fields of ``quire.v1``, which errors use."""

    @abstractmethod
    def events(self, messages: Messages) -> AsyncGenerator[BaseModel, None]:
        """Yield the events of the messages; a ``TypedEvent`` is sent with its type as its name."""

    @abstractmethod
    def whole(self, messages: Sequence[pb.GenerateStreamResponse]) -> BaseModel:
        """Return the complete answer; this is slow if there are many logprobs."""

    def failed(self, error: HttpError) -> BaseModel:
        """Return the last event of a stream that fails."""
        return error.body


async def _translated(
    request: web.Request, make: Callable[[], AnswerWriter[B]]
) -> tuple[AnswerWriter[B], list[pb.Generation]]:
    """Return the writer of a request and its prompts; a large body is translated in a thread."""

    def translate() -> tuple[AnswerWriter[B], list[pb.Generation]]:
        writer = make()
        return writer, writer.generations()

    # A body that comes in chunks has no length.
    is_small = (request.content_length or INLINE_BODY_BYTES + 1) <= INLINE_BODY_BYTES
    return translate() if is_small else await asyncio.to_thread(translate)


def answering(
    servicer: GenerationServicer,
    turn: asyncio.Lock,
    body_type: type[B],
    writer_type: Callable[[B, ServedModel, str, asyncio.Lock], AnswerWriter[B]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that sends the complete answer, or streams it as events if the body asks for that."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body, tenant = await read_body(request, body_type), request[TENANT]
        name = request_id(request, body.request_id)
        model = await servicer.joined_model(tenant)
        writer, generations = await _translated(request, lambda: writer_type(body, model, name, turn))
        last = request.headers.get("Last-Event-ID") if writer.resumes == "asked" and body.stream else None
        if last:
            name, _, number = last.rpartition(":")
            return await request.app[ANSWERS].resume(request, name, number, "Last-Event-ID")
        headers, sizes = request.headers.items(), PromptLogprobs()
        for each in generations:
            each.session = body.session

        def checked(valid: ValidRequest) -> None:
            # The events of a stream have the logprobs of one prompt each.
            (PromptLogprobs() if body.stream else sizes).add_request(valid)
            if valid.is_clamped:
                request[MAX_TOKENS] = min(
                    valid.params.max_tokens, request.get(MAX_TOKENS, model.max_model_len)
                )

        names = writer.names()
        messages = run(servicer, tenant, generations, headers, names, checked)
        if body.stream:
            events, failed = encoded(writer.events(messages), writer.end_of_stream), writer.failed
            if last is None and writer.resumes != "always":
                return await send_events(request, events, failed)
            return await request.app[ANSWERS].begin(request, events, failed, has_ids=last is not None)
        try:
            check_answer_size(generations, model.max_model_len)
        except InvalidArgument as error:
            raise error.renamed(names[0]) from error
        async with aclosing(messages):
            received = await all_of(messages)
        options = [each.response for each in generations]
        is_large = any(each.HasField("logprobs") or each.HasField("prompt_logprobs") for each in options)
        return await response_in_thread(lambda: writer.whole(received), turn if is_large else None)

    return answer
