"""Serves ``/v1/chat/completions``, which returns the assistant's next message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from aiohttp import web

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.router.answer_size import all_of, check_answer_size
from quire.services.router.http.authorization import TENANT
from quire.services.router.http.bodies import read_body, request_id, response_in_thread
from quire.services.router.http.conversation import conversation
from quire.services.router.http.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.services.router.http.requests import ChatCompletionRequest
from quire.services.router.http.responses import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    FinishReason,
    finish_name,
)
from quire.services.router.http.sampling_fields import (
    answer_format,
    sampling_params,
    sent_names,
    stopping_params,
)
from quire.services.router.http.streams import Tagged, run, send_events
from quire.services.router.http.tools import CallReader, ToolUse
from quire.services.router.http.usage import UsageCount
from quire.services.router.servicer import GenerationServicer, collected


class ChatCompletions:
    """Handles requests to ``/v1/chat/completions``."""

    def __init__(self, servicer: GenerationServicer, turn: asyncio.Lock) -> None:
        self._servicer = servicer
        self._turn = turn

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Return the complete answer, or stream it as events if the body asks for that."""
        body = await read_body(request, ChatCompletionRequest)
        model = await self._servicer.joined_model(request[TENANT])
        name = request_id(request, body.request_id)
        use = ToolUse.of(body)
        writer = _Writer(body, use, model, name, self._turn)
        generations = [_generation(body, use, name)]
        names = _sent_names(body, use)
        messages = run(self._servicer, request[TENANT], generations, request.headers.items(), [names])
        if body.stream:
            return await send_events(request, writer.events(messages))
        check_answer_size(generations)
        async with aclosing(messages):
            received = await all_of(messages, lambda message: message.response)
        has_logprobs = body.logprobs or body.prompt_logprobs is not None
        return await response_in_thread(lambda: writer.whole(received), self._turn if has_logprobs else None)


def _generation(body: ChatCompletionRequest, use: ToolUse, name: str) -> pb.Generation:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("top_logprobs", "needs logprobs to be true")
    wanted, call = answer_format(body), use.answer_format()
    if wanted is not None and call is not None:
        raise InvalidArgument("tool_choice", "cannot demand a call where the answer has another form already")
    arguments = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return pb.Generation(
        model=body.model,
        chat=conversation(body.messages, use, arguments),
        sampling=sampling_params(body),
        stopping=stopping_params(body, max_tokens),
        response=pb.ResponseOptions(
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            prompt_token_ids=bool(body.return_token_ids or body.prompt_logprobs is not None),
            keep_special_tokens=body.skip_special_tokens is False,
            keep_stop_string=bool(body.include_stop_str_in_output),
        ),
        request_id=name,
        format=wanted or call,
        cache_salt=body.cache_salt,
    )


def _sent_names(body: ChatCompletionRequest, use: ToolUse) -> dict[str, str]:
    """Return the client's names of fields of ``quire.v1``."""
    names = {"token_ids": "messages", "text": "messages", **sent_names(body)}
    if body.max_completion_tokens is not None:
        names["stopping.max_tokens"] = "max_completion_tokens"
    if use.must_call:
        names["format.json_schema"] = "tools"
    return names


class _Writer:
    """Writes the answers of a request, as one body or as events."""

    def __init__(
        self, body: ChatCompletionRequest, use: ToolUse, model: ServedModel, name: str, turn: asyncio.Lock
    ) -> None:
        self._body = body
        self._turn = turn
        self._use = use
        self._model = model
        self._id = f"chatcmpl-{name}"
        self._created = int(time.time())
        self._names = TokenNames(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    async def events(
        self, messages: AsyncGenerator[Tagged, None]
    ) -> AsyncGenerator[ChatCompletionChunk, None]:
        """Yield each answer's role, an event for each message, and the token counts if requested."""
        body, count = self._body, UsageCount()
        readers: dict[int, CallReader] = {}
        async with aclosing(messages):
            async for _, response in messages:
                count.add(response)
                if response.index not in readers:
                    readers[response.index] = self._reader()
                    role = ChatDelta(
                        index=response.index,
                        delta=AnswerMessage(role="assistant", content=""),
                        finish_reason=None,
                    )
                    first = self._chunk([role], count)
                    if response.prompt_logprobs:
                        async with self._turn:
                            await asyncio.to_thread(self._add_prompt, first, response)
                    else:
                        self._add_prompt(first, response)
                    yield first
                yield self._chunk([self._delta(response, readers[response.index])], count)
        if body.includes_usage:
            last = self._chunk([], count)
            last.usage = count.final()
            yield last

    def whole(self, messages: Sequence[Tagged]) -> ChatCompletion:
        """Return the complete answer; this is slow if there are many logprobs."""
        count = UsageCount()
        for _, response in messages:
            count.add(response)
        answer = collected([response for _, response in messages])
        completion = ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model.name,
            choices=[self._choice(choice) for choice in answer.choices],
            usage=count.final(),
        )
        self._add_prompt(completion, answer)
        return completion

    def _reader(self) -> CallReader:
        return CallReader(self._use, self._model.chat_template)

    def _chunk(self, choices: list[ChatDelta], count: UsageCount) -> ChatCompletionChunk:
        chunk = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model.name,
            choices=choices,
        )
        if self._body.includes_usage:
            chunk.usage = count.so_far() if self._body.counts_on else None
        return chunk

    def _delta(self, response: pb.GenerateStreamResponse, reader: CallReader) -> ChatDelta:
        delta = AnswerMessage(content=reader.feed(response.text))
        reason = finish_name(response.finish_reason)
        if reason:
            content, calls = reader.finish()
            delta.content = (delta.content or "") + content
            for index, call in enumerate(calls):
                call.index = index
            if calls:
                delta.tool_calls, reason = calls, "tool_calls"
        event = ChatDelta(
            index=response.index, delta=delta, logprobs=self._logprobs(response), finish_reason=reason
        )
        if self._body.return_token_ids:
            event.token_ids = list(response.token_ids)
        return event

    def _choice(self, choice: pb.Choice) -> ChatChoice:
        reader = self._reader()
        content = reader.feed(choice.text)
        rest, calls = reader.finish()
        message = AnswerMessage(role="assistant", content=content + rest)
        reason: FinishReason | None = finish_name(choice.finish_reason)
        if calls:
            message.tool_calls, reason = calls, "tool_calls"
            message.content = message.content or None
        written = ChatChoice(
            index=choice.index, message=message, logprobs=self._logprobs(choice), finish_reason=reason
        )
        if self._body.return_token_ids:
            written.token_ids = list(choice.token_ids)
        return written

    def _logprobs(self, answer: pb.Choice | pb.GenerateStreamResponse) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(self._names, answer.token_ids, answer.logprobs)

    def _add_prompt(
        self,
        written: ChatCompletion | ChatCompletionChunk,
        answer: pb.GenerateResponse | pb.GenerateStreamResponse,
    ) -> None:
        if self._body.return_token_ids:
            written.prompt_token_ids = list(answer.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            written.prompt_logprobs = prompt_logprobs(
                self._names, answer.prompt_token_ids, answer.prompt_logprobs
            )
