"""Writes answers in the form that completions and chat completions share."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.services.requests.served_model import ServedModel
from quire.services.router.grpc.servicer import collected
from quire.services.router.http.openai.answer_bodies import ChatCompletionChunk, Completion, Usage
from quire.services.router.http.openai.logprobs import TokenNames
from quire.services.router.http.openai.sampling_fields import GenerationFields
from quire.services.router.http.openai.usage import UsageCount
from quire.services.router.http.shared.answers import AnswerWriter, Messages

B = TypeVar("B", bound=GenerationFields)
E = TypeVar("E", Completion, ChatCompletionChunk)


class OpenAIWriter(AnswerWriter[B], Generic[B, E]):
    """A request to ``/v1/completions`` or ``/v1/chat/completions``."""

    id_prefix: ClassVar[str]
    end_of_stream = b"data: [DONE]\n\n"
    is_read_only = False
    """Whether the client wants only its prompt's logprobs, so that no completion tokens are counted."""

    def __init__(self, body: B, model: ServedModel, name: str, turn: asyncio.Lock) -> None:
        super().__init__(body, model, name, turn)
        self._head: dict[str, Any] = {
            "id": f"{self.id_prefix}-{name}",
            "created": int(time.time()),
            "model": body.model or model.name,
        }
        """What the whole answer and all events begin with."""
        self._names = TokenNames(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    async def events(self, messages: Messages) -> AsyncGenerator[E, None]:
        """Yield the events of each message, and at the end the token counts if the client asked for them."""
        body, count = self.body, UsageCount(is_read_only=self.is_read_only)
        async with aclosing(messages):
            async for response in messages:
                count.add(response)
                if response.prompt_logprobs:
                    async with self._turn:
                        events = await asyncio.to_thread(self._events, response)
                else:
                    events = self._events(response)
                for event in events:
                    if body.includes_usage:
                        event.usage = count.so_far() if body.counts_on else None
                    yield event
        if body.includes_usage:
            last = self._event([])
            last.usage = count.final()
            yield last

    def whole(self, messages: Sequence[pb.GenerateStreamResponse]) -> BaseModel:
        """Return the complete answer; this is slow if there are many logprobs."""
        count = UsageCount(is_read_only=self.is_read_only)
        by_prompt: dict[int, list[pb.GenerateStreamResponse]] = {}
        for response in messages:
            count.add(response)
            by_prompt.setdefault(response.index // (self.body.n or 1), []).append(response)
        answers = [collected(by_prompt[at]) for at in sorted(by_prompt)]
        return self._whole(answers, count.final())

    def options(
        self,
        *,
        logprobs: int | None,
        prompt_logprobs: int | None,
        prompt_token_ids: bool,
        parse: bool = False,
    ) -> pb.ResponseOptions:
        """Return what the answers shall contain."""
        return pb.ResponseOptions(
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_token_ids=prompt_token_ids,
            keep_special_tokens=self.body.skip_special_tokens is False,
            keep_stop_string=bool(self.body.include_stop_str_in_output),
            parse=parse,
        )

    @abstractmethod
    def _events(self, response: pb.GenerateStreamResponse) -> list[E]:
        """Return the events of a message."""

    @abstractmethod
    def _event(self, choices: list[Any]) -> E:
        """Return an event with parts of answers."""

    @abstractmethod
    def _whole(self, answers: Sequence[pb.GenerateResponse], usage: Usage) -> BaseModel:
        """Return the body with the answers of all prompts."""
