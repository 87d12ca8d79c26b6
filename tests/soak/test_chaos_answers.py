"""The comparison of answers in chaos runs, and what their clients make of errors and streams."""

from __future__ import annotations

import grpc.aio

from quire.protos import inference_pb2 as pb
from tests.soak.chaos.answers import add_message, difference
from tests.soak.chaos.load import DEADLINE, LATE, LOST, ROUTER_GONE, Sent, draw_request, outcome_of_error
from tests.testing.rpc_errors import rpc_error


def answer(*token_ids: int, text: str = "ab", logprob: float = -0.5) -> pb.GenerateResponse:
    logprobs = [pb.TokenLogprobs(logprob=logprob) for _ in token_ids]
    choice = pb.Choice(token_ids=token_ids, text=text, logprobs=logprobs, finish_reason=pb.FINISH_REASON_STOP)
    return pb.GenerateResponse(choices=[choice])


def test_equal_answers_do_not_differ() -> None:
    other = answer(1, 2)
    other.request_id, other.usage.retries = "other", 3
    assert difference(other, answer(1, 2)) is None


def test_differences_are_named() -> None:
    right = answer(1, 2)
    assert difference(pb.GenerateResponse(), right) == "answers [] instead of [0]"
    assert (
        difference(answer(1, 3), right) == "answer 0: 2 tokens that differ from the right 2 from number 1 on"
    )
    assert difference(answer(1), right) == "answer 0: 1 tokens that differ from the right 2 from number 1 on"
    assert difference(answer(1, 2, text="b"), right) == "answer 0: text is 'b' instead of 'ab'"
    assert "logprobs that differ" in (difference(answer(1, 2, logprob=-0.25), right) or "")


def test_a_stream_adds_up_to_the_answer() -> None:
    whole = pb.GenerateResponse()
    for token_id, text, reason in ((1, "a", None), (2, "b", pb.FINISH_REASON_STOP)):
        logprobs = [pb.TokenLogprobs(logprob=-0.5)]
        message = pb.GenerateStreamResponse(
            token_ids=[token_id], text=text, logprobs=logprobs, finish_reason=reason
        )
        add_message(whole, message)
    assert difference(whole, answer(1, 2)) is None


def test_errors_count_apart_only_where_a_fault_explains_them() -> None:
    patient = draw_request(1, 0, 9)._replace(manner="whole")
    hasty = patient._replace(manner="hasty")
    late, gone = grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE

    def outcome(code: grpc.StatusCode, sent: Sent, *, router_has_gone: bool = False) -> str:
        return outcome_of_error(rpc_error(code, "Socket closed"), sent, router_has_gone=router_has_gone)[0]

    assert (outcome(late, hasty), outcome(late, patient)) == (DEADLINE, LATE)
    assert (outcome(gone, patient), outcome(gone, patient, router_has_gone=True)) == (LOST, ROUTER_GONE)
    assert outcome(grpc.StatusCode.INTERNAL, patient, router_has_gone=True) == LOST
