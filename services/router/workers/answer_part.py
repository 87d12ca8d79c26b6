"""The part that a worker has added to one answer of a request, as plain values.

A message of the output stream contains tokens of many requests. A protobuf object for each of these tokens
would cost more than everything else that the router does with the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2


@dataclass(slots=True)
class AnswerPart:
    """New tokens of one sequence, and how it ends.

    Attributes:
        token_ids: the tokens of one or more steps.
        logprobs: those of each token; empty if the worker was not asked for them.
        index: index of the sequence in its request.
        finish_reason: why the sequence ended; set only in its last part.
        score: score of an answer of a beam search, else None.
        num_accepted_draft_tokens: how many of the tokens were accepted draft tokens.
        num_generated_tokens: how many tokens its worker has generated for a beam search so far, else 0.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    index: int = 0
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED
    score: float | None = None
    num_accepted_draft_tokens: int = 0
    num_generated_tokens: int = 0

    def extend(self, later: AnswerPart) -> None:
        """Add the next part of the same sequence."""
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = self.finish_reason or later.finish_reason
        self.score = self.score if later.score is None else later.score
        self.num_accepted_draft_tokens += later.num_accepted_draft_tokens


def part_of_tokens(tokens: Sequence[worker_pb2.SampledToken], finish_reason: pb.FinishReason) -> AnswerPart:
    """Return the part with the sampled tokens of a request's only sequence."""
    return AnswerPart(
        token_ids=[token.token_id for token in tokens],
        logprobs=[token.logprobs for token in tokens if token.HasField("logprobs")],
        finish_reason=finish_reason,
    )


def part_of_output(output: worker_pb2.SequenceOutput) -> AnswerPart:
    """Return the part that a decode worker's message contains for one sequence."""
    part = part_of_tokens(output.tokens, output.finish_reason)
    part.index = output.index
    part.score = output.score if output.HasField("score") else None
    part.num_accepted_draft_tokens = output.num_accepted_draft_tokens
    part.num_generated_tokens = output.num_generated_tokens
    return part
