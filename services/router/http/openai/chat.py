"""Serves ``/v1/chat/completions``, which returns the assistant's next message."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.served_model import ServedModel
from quire.services.router.http.openai.answer_bodies import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    CustomCall,
    FunctionCall,
    ToolCall,
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
from quire.services.router.http.openai.tools import ToolUse, input_of


@dataclass(slots=True)
class _Answer:
    """What has not been written yet of one answer."""

    tokens: list[tuple[int, pb.TokenLogprobs | None]] = field(default_factory=list)
    """Tokens that no piece covers yet, with their logprobs if the client asked for them."""
    due_ids: list[int] = field(default_factory=list)
    """Tokens that the next event reports."""
    content_ids: list[int] = field(default_factory=list)
    content_logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    """Those of content, if the client asked for logprobs."""
    inputs: dict[int, str] = field(default_factory=dict)
    """Arguments of calls of custom tools that were not sent yet, by the index of the call."""

    def add(self, message: pb.Choice | pb.GenerateStreamResponse) -> None:
        """Add the tokens of a message."""
        self.tokens += zip_longest(message.token_ids, message.logprobs)

    def cover(self, piece: pb.Piece) -> None:
        """Let the next event report the tokens of a piece."""
        for token_id, logprobs in self.tokens[: piece.num_tokens]:
            self.due_ids.append(token_id)
            if logprobs is not None and piece.HasField("content"):
                self.content_ids.append(token_id)
                self.content_logprobs.append(logprobs)
        del self.tokens[: piece.num_tokens]


class ChatWriter(OpenAIWriter[ChatCompletionRequest, ChatCompletionChunk]):
    """A request to ``/v1/chat/completions``."""

    id_prefix = "chatcmpl"
    resumes = "asked"

    def __init__(
        self, body: ChatCompletionRequest, model: ServedModel, name: str, turn: asyncio.Lock
    ) -> None:
        super().__init__(body, model, name, turn)
        self._use = ToolUse.of(body)
        # The client of special tokens wants the text as the model wrote it.
        self._is_divided = body.skip_special_tokens is not False
        self._custom_names = self._use.custom_names
        self._answers: dict[int, _Answer] = {}

    def generations(self) -> list[pb.Generation]:
        """Return the conversation.

        Raises:
            InvalidArgument: two fields contradict each other.
        """
        body = self.body
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        if not self._is_divided and self._use.choice is not None:
            if self._use.choice.mode == pb.TOOL_MODE_REQUIRED:
                raise InvalidArgument("skip_special_tokens", "must not be false where a call is demanded")
            self._use = self._use._replace(choice=None)
        arguments = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort == "none":
            arguments.setdefault("enable_thinking", False)
        for name, value in (("reasoning_effort", body.reasoning_effort), ("verbosity", body.verbosity)):
            if value is not None:
                arguments.setdefault(name, value)
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
                parse=self._is_divided,
            ),
            request_id=self._name,
            format=answer_format(body),
            cache_salt=body.cache_salt,
            priority=body.priority,
        )
        return [generation]

    def names(self) -> list[dict[str, str]]:
        """Return the client's names of fields of ``quire.v1``."""
        names = {"token_ids": "messages", "text": "messages", **sent_names(self.body)}
        if self.body.max_completion_tokens is not None:
            names["stopping.max_tokens"] = "max_completion_tokens"
        return [names]

    def _events(self, response: pb.GenerateStreamResponse) -> list[ChatCompletionChunk]:
        """Return the events for the message; the first event of each answer contains the role."""
        events, index = [], response.index
        if index not in self._answers:
            self._answers[index] = _Answer()
            message = AnswerMessage(role="assistant", content="")
            first = self._event([ChatDelta(index=index, delta=message, finish_reason=None)])
            self._add_prompt(first, response)
            events.append(first)
        answer = self._answers[index]
        if self.body.logprobs or self.body.return_token_ids:
            answer.add(response)
        deltas: list[ChatDelta] = []
        for piece in self._pieces(response):
            answer.cover(piece)
            for message in self._messages(piece, answer):
                deltas.append(ChatDelta(index=index, delta=message, finish_reason=None))
                self._add_tokens(deltas[-1], answer)
        if reason := finish_name(response.finish_reason):
            # An input that is not complete comes as it is, as in a whole answer.
            for at, text in answer.inputs.items():
                if text:
                    cut = AnswerMessage(tool_calls=[ToolCall(index=at, custom=CustomCall(input=text))])
                    deltas.append(ChatDelta(index=index, delta=cut, finish_reason=None))
                    self._add_tokens(deltas[-1], answer)
            deltas.append(ChatDelta(index=index, delta=AnswerMessage(), finish_reason=reason))
            self._add_tokens(deltas[-1], answer)
        return [*events, *(self._event([delta]) for delta in deltas)]

    def _event(self, choices: list[ChatDelta]) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, object="chat.completion.chunk", choices=choices)

    def _whole(self, answers: Sequence[pb.GenerateResponse], usage: Usage) -> ChatCompletion:
        (answer,) = answers
        completion = ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=[self._choice(choice) for choice in answer.choices],
            usage=usage,
        )
        self._add_prompt(completion, answer)
        return completion

    def _pieces(self, message: pb.Choice | pb.GenerateStreamResponse) -> Sequence[pb.Piece]:
        """Return the pieces of a message; of one that is not divided, all of its text."""
        if self._is_divided or not (message.text or message.token_ids):
            return message.pieces
        return [pb.Piece(content=message.text, num_tokens=len(message.token_ids))]

    def _messages(self, piece: pb.Piece, answer: _Answer) -> Iterator[AnswerMessage]:
        """Yield what a piece adds to the message of a stream."""
        if piece.reasoning:
            yield AnswerMessage(reasoning_content=piece.reasoning)
        elif piece.content:
            yield AnswerMessage(content=piece.content)
        elif piece.HasField("tool_call"):
            for call in self._parts_of_call(piece.tool_call, answer.inputs):
                yield AnswerMessage(tool_calls=[call])

    def _parts_of_call(self, call: pb.ToolCall, inputs: dict[int, str]) -> Iterator[ToolCall]:
        """Yield the head of a call and then its arguments; the input of a custom tool comes whole."""
        index = call.index
        if call.name:
            head = self._call(call, "")
            head.index = index
            yield head
            if head.custom is not None:
                inputs[index] = ""
        if index not in inputs:
            if call.arguments:
                yield ToolCall(index=index, function=FunctionCall(arguments=call.arguments))
            return
        inputs[index] += call.arguments
        if call.arguments.endswith("}") and (text := input_of(inputs[index])) != inputs[index]:
            yield ToolCall(index=index, custom=CustomCall(input=text))
            inputs[index] = ""

    def _choice(self, choice: pb.Choice) -> ChatChoice:
        answer = _Answer()
        answer.add(choice)
        pieces, calls = self._pieces(choice), []
        for piece in pieces:
            answer.cover(piece)
            if piece.tool_call.name:
                calls.append(self._call(piece.tool_call, piece.tool_call.arguments))
        content = "".join(piece.content for piece in pieces)
        message = AnswerMessage(role="assistant", content=content or (None if calls else ""))
        if reasoning := "".join(piece.reasoning for piece in pieces):
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = calls
        reason = finish_name(choice.finish_reason)
        written = ChatChoice(index=choice.index, message=message, logprobs=None, finish_reason=reason)
        self._add_tokens(written, answer)
        return written

    def _call(self, call: pb.ToolCall, arguments: str) -> ToolCall:
        """Return a call with these arguments."""
        if call.name in self._custom_names:
            custom = CustomCall(name=call.name, input=input_of(arguments))
            return ToolCall(id=call.id, type="custom", custom=custom)
        function = FunctionCall(name=call.name, arguments=arguments)
        return ToolCall(id=call.id, type="function", function=function)

    def _add_tokens(self, written: ChatChoice | ChatDelta, answer: _Answer) -> None:
        """Add what the client asked for about the tokens that are due."""
        if self.body.logprobs:
            written.logprobs = chat_logprobs(self._names, answer.content_ids, answer.content_logprobs)
        if self.body.return_token_ids:
            written.token_ids = answer.due_ids
        answer.due_ids, answer.content_ids, answer.content_logprobs = [], [], []

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
