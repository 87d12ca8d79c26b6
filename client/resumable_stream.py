"""Keeps what a client has received of a stream or a batch, so that another router can continue it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import grpc

from quire.client import conversion
from quire.client.errors import Interrupted, QuireError
from quire.client.types import Completion, Delta
from quire.protos import inference_pb2 as pb

CANNOT_CONTINUE = "CANNOT_CONTINUE"


class ResumableStream:
    """A streamed request, and what has been received of its answers.

    The client chooses the seed if the caller gave none, since the next router must use the same one. A
    conversation continues from the token ids that the first router made of it: a chat template may write the
    time of day into the prompt.

    Attributes:
        is_complete: whether all answers have been received; the last message of a stream has the usage.
    """

    def __init__(self, generation: pb.Generation) -> None:
        self._generation = generation
        if not generation.sampling.HasField("seed"):
            generation.sampling.seed = secrets.randbits(64)
        if generation.WhichOneof("prompt") == "chat":
            generation.response.prompt_token_ids = True
        self.is_complete = False
        self._answers: dict[int, pb.ReceivedAnswer] = {}
        self._origin = ""
        self._prompt_token_ids: list[int] = []

    @property
    def is_under_way(self) -> bool:
        """Whether a part of an answer has been delivered."""
        return bool(self._answers)

    def receive(self, response: pb.GenerateStreamResponse, num_moves: int) -> Delta:
        """Return one step of the answers as if the request had never moved.

        Args:
            num_moves: number of times that it has moved to another router.
        """
        if response.request_id:
            if self._origin:
                response.ClearField("request_id")
                response.ClearField("prompt_logprobs")
            else:
                self._origin = response.origin
                self._prompt_token_ids = list(response.prompt_token_ids)
        if response.token_ids or response.text or response.finish_reason:
            answer = self._answers.setdefault(response.index, pb.ReceivedAnswer(index=response.index))
            answer.token_ids.extend(response.token_ids)
            answer.num_characters += len(response.text)
            answer.is_finished = bool(response.finish_reason)
        self.is_complete = response.HasField("usage")
        delta = conversion.to_delta(response)
        if delta.usage is None or not num_moves:
            return delta
        return replace(delta, usage=replace(delta.usage, retries=delta.usage.retries + num_moves))

    def request(self, cause: QuireError | None = None) -> pb.GenerateStreamRequest:
        """Return the request for what has not been received yet.

        Args:
            cause: the failure of the last attempt.

        Raises:
            Interrupted: a part of the answer was delivered, and its rest cannot be generated separately.
        """
        generation = pb.Generation()
        generation.CopyFrom(self._generation)
        if not self._answers:
            return pb.GenerateStreamRequest(generation=generation)
        if kind := _unique_kind(generation.sampling):
            raise Interrupted(
                f"the router was lost after a part of the answer, and {kind} cannot continue on another "
                "router: send the request again",
                code=grpc.StatusCode.ABORTED,
                reason=CANNOT_CONTINUE,
            ) from cause
        if generation.WhichOneof("prompt") == "chat":
            generation.chat.rendered.ids.extend(self._prompt_token_ids)
        generation.response.ClearField("prompt_logprobs")
        generation.response.ClearField("prompt_token_ids")
        generation.received.extend(self._answers.values())
        generation.origin = self._origin
        return pb.GenerateStreamRequest(generation=generation)


class ResumableBatch:
    """The prompts of a batch, and which of them have been answered."""

    def __init__(self, generations: Sequence[pb.Generation]) -> None:
        self._generations = generations
        self._left = list(range(len(generations)))
        self._asked: list[int] = []

    @property
    def is_under_way(self) -> bool:
        """Whether an answer or an error has been delivered."""
        return len(self._left) < len(self._generations)

    @property
    def is_complete(self) -> bool:
        """Whether all answers and errors have been received."""
        return self.is_under_way and not self._left

    def receive(self, response: pb.GenerateBatchResponse, _: int) -> tuple[int, Completion | QuireError]:
        """Return the index of a prompt, and its answer or error."""
        index = self._asked[response.index]
        self._left.remove(index)
        return index, conversion.to_outcome(response)

    def request(self, _: QuireError | None = None) -> pb.GenerateBatchRequest:
        """Return the request for the prompts that have not been answered yet."""
        self._asked = list(self._left)
        return pb.GenerateBatchRequest(generations=[self._generations[index] for index in self._asked])


def _unique_kind(sampling: pb.SamplingParams) -> str:
    """Return the kind of a request whose answers cannot continue; empty if they can."""
    if sampling.HasField("beam"):
        return "a beam search"
    if sampling.best_of > max(sampling.n, 1):
        return "a request with best_of"
    if sampling.HasField("kv_budget_tokens"):
        return "an answer with kv_budget_tokens"
    return ""
