"""Limits the size of answers that are sent as one message."""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.rpc.server import PUBLIC_MESSAGE_BYTES
from quire.services.requests.validation import ValidRequest

MAX_ANSWER_BYTES = PUBLIC_MESSAGE_BYTES - (64 << 10)
"""Maximum size of the answers in one message; the remaining 64 KiB are for the message's other fields."""
TOKEN_BYTES, CANDIDATE_BYTES = 13, 10
"""Approximate bytes in a message of a token with its logprob, and of each top candidate listed with it."""


def check_answer_size(generations: Sequence[pb.Generation], max_model_len: int) -> None:
    """Refuse generations whose answers of maximum length would be too large for one message.

    Only logprobs can make an answer that large. If ``max_tokens`` is absent, nothing is refused here, because
    the answer may be much shorter than its limit; ``all_of`` then checks the actual size. Prompts of token
    ids are counted here too, so that none of them is computed in vain.

    Raises:
        InvalidArgument: the answers could become too large; the error names the field.
    """
    num_bytes, prompts = 0, PromptLogprobs()
    for generation in generations:
        num_answers, options = max(generation.sampling.n, 1), generation.response
        if options.HasField("prompt_logprobs"):
            prompts.add(len(generation.token_ids.ids), options.prompt_logprobs)
        if options.HasField("logprobs"):
            max_tokens = min(generation.stopping.max_tokens, max_model_len)
            num_bytes += num_answers * max_tokens * _token_bytes(options.logprobs)
    if num_bytes > MAX_ANSWER_BYTES:
        raise _too_large(f"the tokens with logprobs take up to about {num_bytes} bytes")


def _token_bytes(num_logprobs: int) -> int:
    return TOKEN_BYTES + num_logprobs * CANDIDATE_BYTES


class PromptLogprobs:
    """Adds up the size of the logprobs of all prompts that are sent in one message."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def add_request(self, request: ValidRequest) -> None:
        """Add a request's prompt before it is computed, as ``add`` does."""
        if request.response.prompt_logprobs is not None:
            self.add(len(request.prompt_token_ids), request.response.prompt_logprobs)

    def add(self, num_tokens: int, num_logprobs: int) -> None:
        """Add the tokens of a prompt, each with ``num_logprobs`` candidates.

        Raises:
            InvalidArgument: the logprobs are too large; the error names the field.
        """
        self._num_tokens += num_tokens
        num_bytes = self._num_tokens * _token_bytes(num_logprobs)
        if num_bytes > MAX_ANSWER_BYTES:
            raise InvalidArgument(
                "response.prompt_logprobs",
                f"those of {self._num_tokens} tokens take about {num_bytes} bytes, and a message has at most "
                f"{MAX_ANSWER_BYTES}: ask for fewer, or send fewer or shorter prompts, or stream the answer",
                reason="ANSWER_TOO_LARGE",
                metadata={"limit": str(MAX_ANSWER_BYTES)},
            )


async def all_of(messages: AsyncIterable[pb.GenerateStreamResponse]) -> list[pb.GenerateStreamResponse]:
    """Return all messages of an answer; fail as soon as they are together too large for one message.

    Raises:
        InvalidArgument: the answer is too large; the error names the field.
    """
    received, num_bytes = [], 0
    async for message in messages:
        received.append(message)
        num_bytes += message.ByteSize()
        if num_bytes > MAX_ANSWER_BYTES:
            raise _too_large(f"after {len(received)} messages the answer has {num_bytes} bytes")
    return received


def check_message_size(response: pb.GenerateStreamResponse) -> None:
    """Refuse a stream's message that is too large to send; ``best_of`` sends a complete answer in one.

    Raises:
        InvalidArgument: the message is too large; the error names the field.
    """
    if (num_bytes := response.ByteSize()) > MAX_ANSWER_BYTES:
        raise _too_large(f"one answer has {num_bytes} bytes")


def _too_large(what: str) -> InvalidArgument:
    return InvalidArgument(
        "stopping.max_tokens",
        f"{what}, and a message has at most {MAX_ANSWER_BYTES}: stream the answer, or ask for fewer "
        "tokens, answers or logprobs",
        reason="ANSWER_TOO_LARGE",
        metadata={"limit": str(MAX_ANSWER_BYTES)},
    )
