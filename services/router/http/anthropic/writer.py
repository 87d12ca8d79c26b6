"""Serves ``/v1/messages``, and counts the tokens of its prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from quire.protos import inference_pb2 as pb
from quire.services.requests.served_model import ServedModel
from quire.services.router.grpc.servicer import GenerationServicer
from quire.services.router.http.anthropic.answer_bodies import (
    Answer,
    Block,
    MessageEvent,
    StopReason,
    TokenCount,
    Usage,
)
from quire.services.router.http.anthropic.conversation import conversation
from quire.services.router.http.anthropic.requests import CountTokensRequest, MessagesRequest
from quire.services.router.http.shared.answers import AnswerWriter, Messages
from quire.services.router.http.shared.errors import HttpError, in_anthropic_form
from quire.services.router.http.shared.token_counts import counting

SIGNATURE = "quire"
_NAMES = {
    "text": "messages",
    "token_ids": "messages",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "stopping.stop_strings": "stop_sequences",
    "chat.template_arguments": "thinking",
    "format.json_schema": "output_config.format",
    "format.grammar": "tools",
}
_DELTAS = {"thinking": "thinking_delta", "text": "text_delta"}


class MessagesWriter(AnswerWriter[MessagesRequest]):
    """A request to ``/v1/messages``."""

    def __init__(self, body: MessagesRequest, model: ServedModel, name: str, turn: asyncio.Lock) -> None:
        super().__init__(body, model, name, turn)
        self._blocks: list[Block] = []
        self._arguments = ""
        """Arguments so far of the call that is the last block."""
        self._num_prompt_tokens = 0

    def generations(self) -> list[pb.Generation]:
        """Return the conversation.

        Raises:
            InvalidArgument: the body cannot be served; the error names the field.
        """
        body = self.body
        config = body.output_config
        schema = config.format.schema_ if config is not None and config.format is not None else None
        generation = pb.Generation(
            model=body.model,
            chat=conversation(body, self._model.chat_template),
            sampling=pb.SamplingParams(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k),
            stopping=pb.StoppingParams(
                # An answer has at least one token. Only its prompt counts here.
                max_tokens=body.max_tokens or 1,
                stop_strings=body.stop_sequences,
            ),
            response=pb.ResponseOptions(parse=True),
            request_id=self._name,
            format=pb.ResponseFormat(json_schema=json.dumps(schema)) if schema is not None else None,
        )
        return [generation]

    def names(self) -> list[dict[str, str]]:
        """Return the client's names of fields of ``quire.v1``."""
        return [_NAMES]

    async def events(self, messages: Messages) -> AsyncGenerator[MessageEvent, None]:
        """Yield the events of each message."""
        async with aclosing(messages):
            async for message in messages:
                for event in self._events(message):
                    yield event

    def whole(self, messages: Sequence[pb.GenerateStreamResponse]) -> BaseModel:
        """Return the complete answer."""
        for message in messages:
            for _ in self._events(message):
                pass
        last = messages[-1]
        return self._answer(self._usage(last.usage), *self._stop(last))

    def failed(self, error: HttpError) -> BaseModel:
        """Return the last event of a stream that fails."""
        return in_anthropic_form(error, self._name)

    def _events(self, message: pb.GenerateStreamResponse) -> Iterator[MessageEvent]:
        if message.prompt_tokens:
            self._num_prompt_tokens = message.prompt_tokens
            # How much of the prompt is cached is not known before the last message.
            usage = Usage(
                input_tokens=message.prompt_tokens,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=0,
                output_tokens=0,
            )
            yield MessageEvent(type="message_start", message=self._answer(usage, None, None))
            yield MessageEvent(type="ping")
        if self.body.max_tokens > 0:
            for piece in message.pieces:
                yield from self._add(piece)
            if message.finish_reason and not self._blocks:
                # Clients expect that an answer has a block.
                yield self._begin(Block(type="text", text=""))
        if message.finish_reason:
            yield from self._end_block()
            reason, sequence = self._stop(message)
            yield MessageEvent(
                type="message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=self._usage(message.usage),
            )
            yield MessageEvent(type="message_stop")

    def _add(self, piece: pb.Piece) -> Iterator[MessageEvent]:
        """Add a piece to the last block, or begin a block with it."""
        last = self._blocks[-1] if self._blocks else None
        if piece.HasField("tool_call"):
            call = piece.tool_call
            if call.name:
                yield from self._end_block()
                yield self._begin(Block(type="tool_use", id=call.id, name=call.name, input={}))
            if call.arguments:
                self._arguments += call.arguments
                yield self._delta("input_json_delta", "partial_json", call.arguments)
            return
        kind, text = ("thinking", piece.reasoning) if piece.reasoning else ("text", piece.content)
        if not text:
            return
        if last is None or last.type != kind:
            yield from self._end_block()
            empty = {"signature": ""} if kind == "thinking" else {}
            yield self._begin(Block.model_validate({"type": kind, kind: "", **empty}))
        block = self._blocks[-1]
        setattr(block, kind, getattr(block, kind) + text)
        yield self._delta(_DELTAS[kind], kind, text)

    def _begin(self, block: Block) -> MessageEvent:
        self._blocks.append(block)
        self._arguments = ""
        begun = block.model_copy()
        return MessageEvent(type="content_block_start", index=len(self._blocks) - 1, content_block=begun)

    def _delta(self, kind: str, member: str, text: str) -> MessageEvent:
        delta: dict[str, str | None] = {"type": kind, member: text}
        return MessageEvent(type="content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _end_block(self) -> Iterator[MessageEvent]:
        if not self._blocks:
            return
        block = self._blocks[-1]
        if block.type == "thinking":
            block.signature = SIGNATURE
            yield self._delta("signature_delta", "signature", SIGNATURE)
        elif block.type == "tool_use":
            block.input = _input(self._arguments)
        yield MessageEvent(type="content_block_stop", index=len(self._blocks) - 1)

    def _stop(self, message: pb.GenerateStreamResponse) -> tuple[StopReason, str | None]:
        """Return the reason why an answer ended, and the stop sequence that ended it."""
        if message.finish_reason == pb.FINISH_REASON_LENGTH:
            num_tokens = message.usage.prompt_tokens + message.usage.completion_tokens
            is_full = num_tokens >= self._model.max_model_len
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if message.finish_reason == pb.FINISH_REASON_TOOL_CALLS:
            return "tool_use", None
        return ("stop_sequence", message.stop_string) if message.stop_string else ("end_turn", None)

    def _usage(self, counts: pb.Usage) -> Usage:
        is_answered = self.body.max_tokens > 0
        return Usage(
            input_tokens=self._num_prompt_tokens - counts.cached_prompt_tokens,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=counts.cached_prompt_tokens,
            output_tokens=counts.completion_tokens if is_answered else 0,
            output_tokens_details={"thinking_tokens": counts.reasoning_tokens if is_answered else 0},
        )

    def _answer(self, usage: Usage, reason: StopReason | None, sequence: str | None) -> Answer:
        return Answer(
            id=f"msg_{self._name}",
            type="message",
            role="assistant",
            model=self.body.model or self._model.name,
            content=list(self._blocks),
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )


def counting_messages(servicer: GenerationServicer) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that counts the tokens of a conversation."""
    return counting(
        servicer,
        CountTokensRequest,
        lambda body, model: conversation(body, model.chat_template),
        _NAMES,
        lambda number: TokenCount(input_tokens=number),
    )


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; those of a call that was cut are empty."""
    try:
        text = json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
        # A model may write half of a surrogate pair, which UTF-8 cannot express.
        value = json.loads(text.encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
