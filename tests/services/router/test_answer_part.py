"""Parts of answers: what they take from a worker's messages, and how they are joined."""

from __future__ import annotations

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.router.workers.answer_part import AnswerPart, part_of_output

LOGPROBS = [pb.TokenLogprobs(logprob=-0.5), pb.TokenLogprobs(logprob=-1.5)]


def test_a_part_has_every_field_of_a_sequence_output() -> None:
    tokens = [
        worker_pb2.SampledToken(token_id=5, logprobs=LOGPROBS[0]),
        worker_pb2.SampledToken(token_id=6, logprobs=LOGPROBS[1]),
    ]
    output = worker_pb2.SequenceOutput(
        index=2, tokens=tokens, finish_reason=pb.FINISH_REASON_STOP, score=0.0, num_accepted_draft_tokens=1
    )
    assert part_of_output(output) == AnswerPart(
        [5, 6], LOGPROBS, 2, pb.FINISH_REASON_STOP, score=0.0, num_accepted_draft_tokens=1
    )
    assert set(AnswerPart.__slots__) == {field.name for field in output.DESCRIPTOR.fields} - {"tokens"} | {
        "token_ids",
        "logprobs",
    }, "a part must have each field"


def test_a_token_without_logprobs_has_none_in_a_part() -> None:
    output = worker_pb2.SequenceOutput(tokens=[worker_pb2.SampledToken(token_id=5)])
    assert part_of_output(output) == AnswerPart([5])


def test_joined_parts_are_the_sum_of_both() -> None:
    part = AnswerPart([5], LOGPROBS[:1], num_accepted_draft_tokens=1)
    part.extend(
        AnswerPart([6], LOGPROBS[1:], 0, pb.FINISH_REASON_LENGTH, score=-2.0, num_accepted_draft_tokens=2)
    )
    assert part == AnswerPart(
        [5, 6], LOGPROBS, 0, pb.FINISH_REASON_LENGTH, score=-2.0, num_accepted_draft_tokens=3
    )
