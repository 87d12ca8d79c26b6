"""Several sequences of one request, between the wire and the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from quire.engine.errors import NoTokenLeftError, RequestFailedError
from quire.engine.sequences.sequence import GeneratedToken, Sequence, SequenceStatus, SequenceUpdate
from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.rpc.errors import InvalidArgument
from quire.sampling.params import BeamParams, SamplingParams
from quire.services.worker.requests.convert import (
    converting,
    no_token_left,
    outputs_to_proto,
    sequence_from_proto,
    without_last_token,
)


def read(token_ids: list[int], **sampling: Any) -> Sequence:
    message = worker_pb2.Sequence(
        sequence_id="r",
        token_ids=token_ids,
        sampling=pb.SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "seed": 7, **sampling}),
        stopping=pb.StoppingParams(max_tokens=4),
        prompt_logprobs=1,
    )
    return sequence_from_proto(message, b"", 100, stops_after_prefill=True)


def update(sequence: Sequence, index: int, token_id: int, **more: Any) -> SequenceUpdate:
    status = more.pop("status", SequenceStatus.DECODING)
    return SequenceUpdate(sequence.copy(index), 3, [GeneratedToken(token_id, None)], status, **more)


def test_the_number_of_sequences_is_read() -> None:
    assert read([1]).params.num_sequences == 1
    assert read([1], n=3).params.n == 3
    beam = pb.BeamParams(width=2, length_penalty=0.0, early_stopping=pb.EARLY_STOPPING_IMPOSSIBLE)
    assert read([1], beam=beam).params.beam == BeamParams(2, 0.0, "never")
    assert read([1], beam=pb.BeamParams(width=2)).params.beam == BeamParams(2, 1.0, False)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"n": 65}, "sampling.n"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": 1e30}, "sampling.temperature"),
        ({"beam": pb.BeamParams(width=1)}, "sampling.beam.width"),
        ({"beam": pb.BeamParams(width=2, length_penalty=2000)}, "sampling.beam.length_penalty"),
        ({"allowed_token_ids": [99999]}, "sampling.allowed_token_ids"),
    ],
)
def test_messages_that_the_engine_does_not_allow_are_refused(sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read([1], **sampling)
    assert caught.value.field == field


def test_a_result_that_cannot_be_converted_ends_its_request() -> None:
    with pytest.raises(RequestFailedError, match="OverflowError: scripted"), converting():
        raise OverflowError("scripted")


def test_constraints_that_forbid_every_token_have_their_paths() -> None:
    paths = {
        "allowed_token_ids": "sampling.allowed_token_ids",
        "bad_words": "sampling.bad_words",
        "min_tokens": "stopping.min_tokens",
        "format": "format",
    }
    for field, path in paths.items():
        error = no_token_left(NoTokenLeftError(field, 3))
        assert (error.field, error.reason) == (path, "NO_TOKEN_LEFT")
        assert "after 3 tokens" in error.problem


def test_a_prefill_worker_does_not_compute_the_last_token() -> None:
    prompt = without_last_token(read([1, 2, 3], n=3, presence_penalty=0.5))
    assert (prompt.token_ids, prompt.num_prompt_tokens) == ([1, 2], 2)
    assert (prompt.params.n, prompt.params.num_prompt_logprobs, prompt.samples_tokens) == (1, None, False)
    assert prompt.stops_after_prefill
    assert without_last_token(read([1, 2], beam=pb.BeamParams(width=2))).params == SamplingParams(
        seed=7, max_tokens=4
    )
    with pytest.raises(InvalidArgument, match="token_ids: must hold at least two"):
        without_last_token(read([1], n=2))


def test_steps_become_one_output_for_each_sequence() -> None:
    sequence = read([1, 2, 3], n=2)
    prefilling = SequenceUpdate(sequence, 2, [], SequenceStatus.PREFILLING)
    assert outputs_to_proto([prefilling]) == []
    outputs = outputs_to_proto(
        [
            update(sequence, 0, 5),
            update(sequence, 1, 6),
            update(sequence, 0, 7, status=SequenceStatus.FINISHED_LENGTH),
            update(sequence, 1, 8),
        ]
    )
    assert [(o.index, [t.token_id for t in o.tokens], o.finish_reason) for o in outputs] == [
        (0, [5, 7], pb.FINISH_REASON_LENGTH),
        (1, [6, 8], pb.FINISH_REASON_UNSPECIFIED),
    ]
    assert not outputs[0].HasField("score")
    (answer,) = outputs_to_proto([update(sequence, 0, 5, status=SequenceStatus.FINISHED_STOPPED, score=-1.5)])
    assert (answer.finish_reason, answer.score) == (pb.FINISH_REASON_STOP, -1.5)


def test_an_end_without_a_token_is_an_output() -> None:
    ended = SequenceUpdate(read([1]), 1, [], SequenceStatus.FINISHED_LENGTH)
    assert [output.finish_reason for output in outputs_to_proto([ended])] == [pb.FINISH_REASON_LENGTH]
