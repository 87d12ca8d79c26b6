"""Several answers to one request: one prefill, one stream, each answer with an end of its own."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import NO_TOKEN_LEFT, InvalidArgument, Unavailable
from tests.testing.rpc_errors import error_of

TEXT = "hello world, stop here"
SEED = 2**64 - 2


def generation(prompt: list[int] | None = None, stop: str = "", **sampling: Any) -> pb.Generation:
    return pb.Generation(
        token_ids=pb.TokenIds(ids=prompt or [5, 6, 7, 8]),
        sampling=pb.SamplingParams(seed=SEED, **sampling),
        stopping=pb.StoppingParams(stop_strings=[stop] if stop else []),
        request_id="test",
    )


async def stream(stub: Any, *arguments: Any, **options: Any) -> list[pb.GenerateStreamResponse]:
    request = pb.GenerateStreamRequest(generation=generation(*arguments, **options))
    return [response async for response in stub.GenerateStream(request, timeout=10)]


def answers_of(responses: list[pb.GenerateStreamResponse]) -> dict[int, list[int]]:
    answers: defaultdict[int, list[int]] = defaultdict(list)
    for response in responses:
        answers[response.index] += response.token_ids
    return dict(answers)


async def test_samples_take_one_prefill_and_end_one_by_one(pair: Any, stub: Any) -> None:
    responses = await stream(stub, n=4)
    assert answers_of(responses) == dict.fromkeys(range(4), pair.script.answer)
    assert sorted(r.index for r in responses if r.finish_reason) == [0, 1, 2, 3]
    assert [r.HasField("usage") for r in responses] == [False] * (len(responses) - 1) + [True]
    assert [r.request_id for r in responses] == ["test"] + [""] * (len(responses) - 1)
    usage = responses[-1].usage
    assert (usage.completion_tokens, usage.blocks_shipped) == (4 * len(pair.script.answer), 3)
    (prefill,), (decode,) = pair.calls("prefill"), pair.calls("decode")
    assert prefill.sequence == decode.sequence
    assert (decode.remote_prefill, decode.sequence.sampling.n) == (True, 4)


async def test_the_unary_call_returns_choices(pair: Any, stub: Any) -> None:
    whole = await stub.Generate(pb.GenerateRequest(generation=generation(n=2)), timeout=10)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, TEXT), (1, TEXT)]
    assert whole.usage.completion_tokens == 2 * len(pair.script.answer)


async def test_more_tokens_than_the_models_length_leaves_are_reported(pair: Any, stub: Any) -> None:
    request = generation([5] * 60, n=2)
    request.stopping.max_tokens = 1000
    whole = await stub.Generate(pb.GenerateRequest(generation=request), timeout=10)
    assert (whole.max_tokens, {choice.finish_reason for choice in whole.choices}) == (
        4,
        {pb.FINISH_REASON_LENGTH},
    )
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=request), timeout=10)
    first, *others = [response async for response in call]
    assert (first.max_tokens, any(each.HasField("max_tokens") for each in others)) == (4, False)
    assert {call.sequence.stopping.max_tokens for call in pair.calls("decode")} == {4}
    request.stopping.max_tokens = 4
    assert not (await stub.Generate(pb.GenerateRequest(generation=request), timeout=10)).HasField(
        "max_tokens"
    )


async def test_a_prompt_of_one_token_needs_no_prefill(pair: Any) -> None:
    responses = await stream(await pair.start(), [5], n=2)
    assert answers_of(responses) == dict.fromkeys(range(2), pair.script.answer)
    assert not pair.calls("prefill")
    assert not pair.calls("decode")[0].remote_prefill


async def test_the_decode_worker_sends_the_prompt_logprobs_of_samples(pair: Any) -> None:
    request = generation(n=2)
    request.response.prompt_logprobs = 1
    await (await pair.start()).Generate(pb.GenerateRequest(generation=request), timeout=10)
    assert not pair.calls("prefill")


async def test_the_best_of_several_are_sent_at_the_end(pair: Any, stub: Any) -> None:
    pair.script.logprobs = [-0.5, -0.2, -0.9, -0.2]
    responses = await stream(stub, n=3, best_of=4)
    num_tokens = len(pair.script.answer)
    assert answers_of(responses) == dict.fromkeys(range(3), pair.script.answer)
    assert [(r.index, r.text, r.finish_reason) for r in responses] == [
        (index, TEXT, pb.FINISH_REASON_STOP) for index in range(3)
    ]
    assert [r.score / num_tokens for r in responses] == pytest.approx([-0.2, -0.2, -0.5])
    assert not any(r.logprobs for r in responses)
    assert [r.HasField("usage") for r in responses] == [False, False, True]
    assert responses[-1].usage.completion_tokens == 4 * num_tokens
    (decode,) = pair.calls("decode")
    assert (decode.sequence.sampling.n, decode.sequence.logprobs) == (4, 0)
    assert decode.sequence.HasField("logprobs")
    assert not decode.sequence.sampling.HasField("best_of")


async def test_the_best_answer_shows_its_own_logprobs(pair: Any, stub: Any) -> None:
    pair.script.logprobs = [-0.5, -0.25]
    request = generation(best_of=2)
    request.response.logprobs = 3
    (choice,) = (await stub.Generate(pb.GenerateRequest(generation=request), timeout=10)).choices
    assert [each.logprob for each in choice.logprobs] == [-0.25] * len(pair.script.answer)
    assert (choice.index, choice.text) == (0, TEXT)


async def test_a_best_of_n_streams_as_n_does(pair: Any) -> None:
    responses = await stream(await pair.start(), n=2, best_of=2)
    assert answers_of(responses) == dict.fromkeys(range(2), pair.script.answer)


async def test_the_best_survive_a_lost_worker(pair: Any, stub: Any, fault: Any) -> None:
    pair.script.logprobs = [-0.5, -0.2, -0.9]
    pair.change("decode", fault=fault(3, Unavailable("killed")))
    responses = await stream(stub, best_of=3)
    assert answers_of(responses) == {0: pair.script.answer}
    assert [r.finish_reason for r in responses] == [pb.FINISH_REASON_STOP]
    assert responses[0].usage.retries > 0


async def test_all_stopped_ends_the_request_at_the_decode_worker(pair: Any, stub: Any) -> None:
    for worker in pair.workers.values():
        worker.pause_before_token = 4 if worker.role == "decode" else None
    responses = await stream(stub, stop="stop", n=3)
    texts = ["".join(r.text for r in responses if r.index == index) for index in range(3)]
    assert texts == ["hello world, "] * 3
    assert [r.finish_reason for r in responses if r.finish_reason] == [pb.FINISH_REASON_STOP] * 3
    (decode,) = [w for w in pair.workers.values() if w.role == "decode" and w.calls]
    await asyncio.wait_for(decode.aborted.wait(), 5)


async def test_a_lost_decode_worker_splits_the_samples(pair: Any, stub: Any, fault: Any) -> None:
    for worker in pair.workers.values():
        if worker.role == "decode":
            worker.fault = fault(3, Unavailable("killed")) if worker.worker_id == "d1" else None
    responses: list[pb.GenerateStreamResponse] = []
    while not pair.workers["d1"].calls:
        responses = await stream(stub, list(range(5, 9 + len(responses))), n=3)
    assert answers_of(responses) == dict.fromkeys(range(3), pair.script.answer)
    assert responses[-1].usage.retries == 1
    apart = [call.sequence for call in pair.calls("decode") if call.sequence.attempt == 1]
    assert sorted((s.sampling.seed, s.num_output_tokens) for s in apart) == [(0, 3), (SEED, 3), (SEED + 1, 3)]
    assert {s.sampling.n for s in apart} == {1}
    assert len({s.sequence_id for s in apart}) == 3
    assert all(call.remote_prefill for call in pair.calls("decode"))


async def test_a_finished_answer_that_gets_stuck_does_not_end_the_others(
    pair: Any, stub: Any, fault: Any
) -> None:
    answer = pair.script.answer
    pair.script.second = answer[:1] * len(answer)
    at = len(answer) - 1
    stuck = InvalidArgument("sampling.bad_words", "leaves no token", reason=NO_TOKEN_LEFT)
    pair.change("decode", fault=fault(at, stuck))
    responses = await stream(stub, n=2, stop="wor")
    texts = ["".join(r.text for r in responses if r.index == index) for index in range(2)]
    assert texts[0] == "hello "
    assert answers_of(responses)[1] == [*pair.script.second[:at], *answer[at:]]
    assert [r.index for r in responses if r.finish_reason] == [0, 1]


@pytest.mark.parametrize(
    ("words", "field"), [([], "sampling.bad_word_token_ids"), (["x"], "sampling.bad_words")]
)
async def test_bad_words_that_leave_no_token_are_named_as_the_client_sent_them(
    pair: Any, stub: Any, fault: Any, words: list[str], field: str
) -> None:
    stuck = InvalidArgument("sampling.bad_words", "leaves no token", reason=NO_TOKEN_LEFT)
    pair.change("decode", fault=fault(2, stuck))
    asked = stream(stub, bad_words=words, bad_word_token_ids=[pb.TokenIds(ids=[9])])
    caught = await error_of(asked)
    assert caught.details() == f"{field}: leaves no token"


async def test_a_failed_prefill_starts_all_samples_again(pair: Any, stub: Any, fault: Any) -> None:
    pair.change("prefill", fault=fault(0, Unavailable("killed")))
    responses = await stream(stub, n=2)
    assert answers_of(responses) == dict.fromkeys(range(2), pair.script.answer)
    assert {call.sequence.sampling.n for call in pair.calls("decode")} == {2}
    assert responses[-1].usage.retries in (1, 2)


async def test_beams_are_sent_at_the_end_with_their_scores(pair: Any, stub: Any) -> None:
    beam = pb.BeamParams(width=3, length_penalty=0.6, early_stopping=pb.EARLY_STOPPING_ENOUGH)
    responses = await stream(stub, beam=beam)
    answer = pair.script.answer
    assert answers_of(responses) == {0: answer, 1: answer[:-1]}
    assert [(r.index, r.score) for r in responses] == [(0, -0.5), (1, -1.5)]
    assert [r.HasField("usage") for r in responses] == [False, True]
    assert pair.calls("decode")[0].sequence.sampling.beam == beam


async def test_a_lost_search_starts_again(pair: Any, stub: Any, fault: Any) -> None:
    pair.change("decode", fault=fault(0, Unavailable("killed")))
    responses = await stream(stub, beam=pb.BeamParams(width=2))
    assert answers_of(responses) == {0: pair.script.answer}
    assert [call.sequence.num_output_tokens for call in pair.calls("decode")] == [0, 0, 0]
    assert {call.sequence.sampling.beam.width for call in pair.calls("decode")} == {2}
