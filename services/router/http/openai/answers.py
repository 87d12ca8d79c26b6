"""Answers a request of either API, as one body or as events: what completions and chat completions share."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from aiohttp import web
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.services.requests.served_model import ServedModel
from quire.services.router.grpc.servicer import GenerationServicer, collected
from quire.services.router.http.openai.logprobs import TokenNames
from quire.services.router.http.openai.responses import ChatCompletionChunk, Completion, Usage
from quire.services.router.http.openai.sampling_fields import GenerationFields
from quire.services.router.http.openai.usage import UsageCount
from quire.services.router.http.shared.bodies import TENANT, read_body, request_id, response_in_thread
from quire.services.router.http.shared.streams import Tagged, run, send_events
from quire.services.router.outputs.answer_size import PromptLogprobs, all_of, check_answer_size

B = TypeVar("B", bound=GenerationFields)
E = TypeVar("E", Completion, ChatCompletionChunk)


class AnswerWriter(ABC, Generic[B, E]):
    """One request: what it asks of the model, and its answers as one body or as events.

    Args:
        name: the request's id.
        turn: lets requests with many logprobs be written one after another.
    """

    is_read_only = False
    """Whether the client wants only its prompt's logprobs, so that no completion tokens are counted."""

    def __init__(self, body: B, model: ServedModel, name: str, turn: asyncio.Lock) -> None:
        self.body = body
        self._model = model
        self._name = name
        self._turn = turn
        self._created = int(time.time())
        self._names = TokenNames(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    async def events(self, messages: AsyncGenerator[Tagged, None]) -> AsyncGenerator[E, None]:
        """Yield the events of each message, and at the end the token counts if the client asked for them."""
        body, count = self.body, UsageCount()
        async with aclosing(messages):
            async for at, response in messages:
                count.add(response)
                if response.prompt_logprobs:
                    async with self._turn:
                        events = await asyncio.to_thread(self._events, at, response)
                else:
                    events = self._events(at, response)
                for event in events:
                    if body.includes_usage:
                        event.usage = count.so_far() if body.counts_on else None
                    yield event
        if body.includes_usage:
            last = self._event([])
            last.usage = count.final(is_read_only=self.is_read_only)
            yield last

    def whole(self, messages: Sequence[Tagged]) -> BaseModel:
        """Return the complete answer; this is slow if there are many logprobs."""
        count = UsageCount()
        by_prompt: dict[int, list[pb.GenerateStreamResponse]] = {}
        for at, response in messages:
            count.add(response)
            by_prompt.setdefault(at, []).append(response)
        answers = [collected(by_prompt[at]) for at in sorted(by_prompt)]
        return self._whole(answers, count.final(is_read_only=self.is_read_only))

    def options(
        self, *, logprobs: int | None, prompt_logprobs: int | None, prompt_token_ids: bool
    ) -> pb.ResponseOptions:
        """Return what the answers shall contain."""
        return pb.ResponseOptions(
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=prompt_token_ids,
            keep_special_tokens=self.body.skip_special_tokens is False,
            keep_stop_string=bool(self.body.include_stop_str_in_output),
        )

    @abstractmethod
    def generations(self) -> list[pb.Generation]:
        """Return the prompts."""

    @abstractmethod
    def names(self) -> list[dict[str, str]]:
        """Return, for each prompt, the client's names of fields of ``quire.v1``, which errors use."""

    @abstractmethod
    def _events(self, at: int, response: pb.GenerateStreamResponse) -> list[E]:
        """Return the events of a message of prompt number ``at``."""

    @abstractmethod
    def _event(self, choices: list[Any]) -> E:
        """Return an event with parts of answers."""

    @abstractmethod
    def _whole(self, answers: Sequence[pb.GenerateResponse], usage: Usage) -> BaseModel:
        """Return the body with the answers of all prompts."""


def answering(
    servicer: GenerationServicer,
    turn: asyncio.Lock,
    body_type: type[B],
    writer_type: Callable[[B, ServedModel, str, asyncio.Lock], AnswerWriter[B, E]],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that sends the complete answer, or streams it as events if the body asks for that."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body, tenant = await read_body(request, body_type), request[TENANT]
        name = request_id(request, body.request_id)
        writer = writer_type(body, await servicer.joined_model(tenant), name, turn)
        generations, headers = writer.generations(), request.headers.items()
        sizes = None if body.stream else PromptLogprobs()
        messages = run(servicer, tenant, generations, headers, writer.names(), sizes)
        if body.stream:
            return await send_events(request, writer.events(messages))
        check_answer_size(generations)
        async with aclosing(messages):
            received = await all_of(messages, lambda message: message.response)
        options = [each.response for each in generations]
        is_large = any(each.HasField("logprobs") or each.HasField("prompt_logprobs") for each in options)
        return await response_in_thread(lambda: writer.whole(received), turn if is_large else None)

    return answer
