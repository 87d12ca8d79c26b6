"""Serves ``/v1/chat/completions``, which returns the assistant's next message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.router.http.openai.answer_bodies import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    FinishReason,
    Usage,
    finish_name,
)
from quire.services.router.http.openai.answers import OpenAIWriter
from quire.services.router.http.openai.conversation import conversation
from quire.services.router.http.openai.logprobs import chat_logprobs, prompt_logprobs
from quire.services.router.http.openai.requests import ChatCompletionRequest
from quire.services.router.http.openai.sampling_fields import (
    answer_format,
    sampling_params,
    sent_names,
    stopping_params,
)
from quire.services.router.http.openai.tools import CallReader, ToolUse


class ChatWriter(OpenAIWriter[ChatCompletionRequest, ChatCompletionChunk]):
    """A request to ``/v1/chat/completions``."""

    def __init__(
        self, body: ChatCompletionRequest, model: ServedModel, name: str, turn: asyncio.Lock
    ) -> None:
        super().__init__(body, model, name, turn)
        self._use = ToolUse.of(body)
        self._readers: dict[int, CallReader] = {}

    def generations(self) -> list[pb.Generation]:
        """Return the conversation.

        Raises:
            InvalidArgument: two fields contradict each other.
        """
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        wanted, call = answer_format(body), self._use.answer_format()
        if wanted is not None and call is not None:
            raise InvalidArgument(
                "tool_choice", "cannot demand a call where the answer has another form already"
            )
        arguments = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", body.reasoning_effort)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        generation = pb.Generation(
            model=body.model,
            chat=conversation(body.messages, self._use, arguments),
            sampling=sampling_params(body),
            stopping=stopping_params(body, max_tokens),
            response=self.options(
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                prompt_logprobs=body.prompt_logprobs,
                prompt_token_ids=bool(body.return_token_ids or body.prompt_logprobs is not None),
            ),
            request_id=self._name,
            format=wanted or call,
            cache_salt=body.cache_salt,
        )
        return [generation]

    def names(self) -> list[dict[str, str]]:
        """Return the client's names of fields of ``quire.v1``."""
        names = {"token_ids": "messages", "text": "messages", **sent_names(self.body)}
        if self.body.max_completion_tokens is not None:
            names["stopping.max_tokens"] = "max_completion_tokens"
        if self._use.must_call:
            names["format.json_schema"] = "tools"
        return [names]

    def _events(self, response: pb.GenerateStreamResponse) -> list[ChatCompletionChunk]:
        """Return an event for the message; the first event of each answer contains the role."""
        events, index = [], response.index
        if index not in self._readers:
            self._readers[index] = self._reader()
            message = AnswerMessage(role="assistant", content="")
            first = self._event([ChatDelta(index=index, delta=message, finish_reason=None)])
            self._add_prompt(first, response)
            events.append(first)
        return [*events, self._event([self._delta(response, self._readers[index])])]

    def _event(self, choices: list[ChatDelta]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=f"chatcmpl-{self._name}",
            object="chat.completion.chunk",
            created=self._created,
            model=self._model.name,
            choices=choices,
        )

    def _whole(self, answers: Sequence[pb.GenerateResponse], usage: Usage) -> ChatCompletion:
        (answer,) = answers
        completion = ChatCompletion(
            id=f"chatcmpl-{self._name}",
            object="chat.completion",
            created=self._created,
            model=self._model.name,
            choices=[self._choice(choice) for choice in answer.choices],
            usage=usage,
        )
        self._add_prompt(completion, answer)
        return completion

    def _reader(self) -> CallReader:
        return CallReader(self._use, self._model.chat_template)

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
        if self.body.return_token_ids:
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
        if self.body.return_token_ids:
            written.token_ids = list(choice.token_ids)
        return written

    def _logprobs(self, answer: pb.Choice | pb.GenerateStreamResponse) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(self._names, answer.token_ids, answer.logprobs)

    def _add_prompt(
        self,
        written: ChatCompletion | ChatCompletionChunk,
        answer: pb.GenerateResponse | pb.GenerateStreamResponse,
    ) -> None:
        if self.body.return_token_ids:
            written.prompt_token_ids = list(answer.prompt_token_ids)
        if self.body.prompt_logprobs is not None:
            written.prompt_logprobs = prompt_logprobs(
                self._names, answer.prompt_token_ids, answer.prompt_logprobs
            )
