"""Serves ``/v1/responses``: one answer, whole or as typed events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, NotFound
from quire.services.requests.served_model import ServedModel
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.openai.chat import ChatWriter
from quire.services.router.http.openai.logprobs import TokenNames
from quire.services.router.http.openai.responses import answer_bodies
from quire.services.router.http.openai.responses.answer_bodies import Response, ResponseEvent
from quire.services.router.http.openai.responses.chat_request import FIELD_NAMES, chat_request, known_tools
from quire.services.router.http.openai.responses.output import Output
from quire.services.router.http.openai.responses.requests import LOGPROBS, ResponseRequest
from quire.services.router.http.shared.answers import AnswerWriter, Messages
from quire.services.router.http.shared.errors import HttpError
from quire.services.router.http.shared.resumable import ANSWERS
from quire.services.router.http.shared.token_counts import counting


class ResponseWriter(AnswerWriter[ResponseRequest]):
    """A request to ``/v1/responses``.

    Raises:
        InvalidArgument: two fields contradict each other.
    """

    resumes = "always"

    def __init__(self, body: ResponseRequest, model: ServedModel, name: str, turn: asyncio.Lock) -> None:
        super().__init__(body, model, name, turn)
        self._created = int(time.time())
        tools = known_tools(body)
        self._chat = ChatWriter(chat_request(body, tools), model, name, turn)
        names = TokenNames(model.tokenizer, as_ids=False) if LOGPROBS in body.include else None
        self._output = Output(name, tools, names)
        self._only_prompt = body.prompt_cache_options.prewarm
        echoed = set(Response.model_fields) & set(ResponseRequest.model_fields)
        self._echo = body.model_dump(include=echoed, exclude_none=True, by_alias=True)
        self._finish_reason = pb.FINISH_REASON_UNSPECIFIED
        self._usage: answer_bodies.ResponseUsage | None = None

    def generations(self) -> list[pb.Generation]:
        """Return the conversation.

        Raises:
            InvalidArgument: two fields contradict each other.
        """
        try:
            return self._chat.generations()
        except InvalidArgument as error:
            raise error.renamed(FIELD_NAMES) from error

    def names(self) -> list[dict[str, str]]:
        """Return the client's names of fields of ``quire.v1``."""
        return [FIELD_NAMES]

    async def events(self, messages: Messages) -> AsyncGenerator[ResponseEvent, None]:
        """Yield the events of each message; the first ones are sent once the model has begun to answer."""
        is_first = True
        async with aclosing(messages):
            async for message in messages:
                if is_first:
                    yield self._event("created", "in_progress")
                    yield self._event("in_progress", "in_progress")
                    is_first = False
                for event in self._add(message):
                    yield event
        for event in self._end():
            yield event

    def whole(self, messages: Sequence[pb.GenerateStreamResponse]) -> Response:
        """Return the complete answer; this is slow if there are many logprobs."""
        for message in messages:
            # The events are not sent, but they build the answer.
            list(self._add(message))
        *_, last = self._end()
        assert last.response is not None
        return last.response

    def failed(self, error: HttpError) -> ResponseEvent:
        """Return the last event of a stream that fails."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        message = error.body.error.message
        if error.retry_after_seconds is not None:
            # Codex reads the time from these words.
            message += f"; try again in {error.retry_after_seconds:g}s"
        return self._event("failed", error={"code": code, "message": message})

    def _add(self, message: pb.GenerateStreamResponse) -> Iterator[ResponseEvent]:
        if message.HasField("usage"):
            self._usage = _usage(message.usage, only_prompt=self._only_prompt)
        self._finish_reason = message.finish_reason or self._finish_reason
        return iter(()) if self._only_prompt else self._output.add(message)

    def _end(self) -> Iterator[ResponseEvent]:
        if self._only_prompt:
            yield self._event("completed")
        elif self._finish_reason == pb.FINISH_REASON_LENGTH:
            yield from self._output.end(is_complete=False)
            yield self._event("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            yield from self._output.end(is_complete=True)
            yield self._event("completed")

    def _event(self, kind: Any, status: Any = None, **members: Any) -> ResponseEvent:
        """Return an event with the answer so far; by default the type is also the answer's status."""
        answer = {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status or kind,
            "error": None,
            "incomplete_details": None,
            "model": self.body.model or self._model.name,
            "output": self._output.items(),
            "usage": self._usage,
            "store": False,
        }
        response = Response(**{**self._echo, **answer, **members})
        return self._output.event(kind, response=response)


def counting_input(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that counts the tokens of the input."""

    def chat_of(body: ResponseRequest, model: ServedModel) -> pb.Chat:
        (generation,) = ResponseWriter(body, model, "", asyncio.Lock()).generations()
        return generation.chat

    return counting(
        servicer,
        ResponseRequest,
        chat_of,
        FIELD_NAMES,
        lambda number: answer_bodies.InputTokens(object="response.input_tokens", input_tokens=number),
    )


async def resumed(request: web.Request) -> web.StreamResponse:
    """Send the rest of a stream; raise ``NotFound`` if it is not in flight here."""
    if request.method != "GET" or request.query.get("stream") != "true":
        return await not_stored(request)
    name, last = request.match_info["response"], request.query.get("starting_after", "-1")
    return await request.app[ANSWERS].resume(request, name.removeprefix("resp_"), last, "starting_after")


async def not_stored(request: web.Request) -> web.Response:
    """Refuse a request for an earlier answer.

    Raises:
        NotFound: always.
    """
    raise NotFound("no answer is stored: keep those that you need, and send their items again in input")


def _usage(counts: pb.Usage, *, only_prompt: bool) -> answer_bodies.ResponseUsage:
    num_output = 0 if only_prompt else counts.completion_tokens
    return answer_bodies.ResponseUsage(
        input_tokens=counts.prompt_tokens,
        input_tokens_details={"cached_tokens": counts.cached_prompt_tokens, "cache_write_tokens": 0},
        output_tokens=num_output,
        output_tokens_details={"reasoning_tokens": 0 if only_prompt else counts.reasoning_tokens},
        total_tokens=counts.prompt_tokens + num_output,
    )
