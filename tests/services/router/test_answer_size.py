"""Answers that no message can hold are refused before they are computed, or as soon as they show it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from quire.client.errors import InvalidRequest, from_rpc_error
from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests.validation import ValidRequest
from quire.services.router.outputs.answer_size import PromptLogprobs, check_answer_size
from tests.testing.rpc_errors import error_of
from tests.testing.valid_requests import valid_request

LIMIT = "quire.services.router.outputs.answer_size.MAX_ANSWER_BYTES"


def generation(
    *, n: int = 1, max_tokens: int | None = None, best_of: int | None = None, logprobs: int | None = None
) -> pb.Generation:
    return pb.Generation(
        token_ids=pb.TokenIds(ids=[5, 6, 7, 8, 9]),
        sampling=pb.SamplingParams(n=n, best_of=best_of),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        response=pb.ResponseOptions(logprobs=logprobs),
    )


def prompt(num_tokens: int, num_logprobs: int | None) -> ValidRequest:
    return valid_request([5] * num_tokens, prompt_logprobs=num_logprobs)


def refusal(error: grpc.aio.AioRpcError) -> InvalidRequest:
    refused = from_rpc_error(error)
    assert isinstance(refused, InvalidRequest)
    return refused


@pytest.mark.parametrize(("n", "max_tokens"), [(1, 100_000), (64, 4096)])
def test_an_answer_that_can_become_too_large_is_refused(n: int, max_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="stream the answer") as caught:
        check_answer_size([generation(), generation(n=n, max_tokens=max_tokens, logprobs=20)], 1 << 20)
    assert (caught.value.field, caught.value.reason) == ("stopping.max_tokens", "ANSWER_TOO_LARGE")
    check_answer_size([generation(n=n, max_tokens=max_tokens), generation(logprobs=20)], 1 << 20)
    check_answer_size([generation(n=n, max_tokens=max_tokens, logprobs=20)], 1000)


def test_the_estimate_holds() -> None:
    token = pb.TokenLogprobs(logprob=-1.5, top=[pb.CandidateLogprob(token_id=300, logprob=-1)] * 20)
    choice = pb.Choice(token_ids=[300] * 1000, logprobs=[token] * 1000)
    with pytest.raises(InvalidArgument) as caught:
        check_answer_size([generation(max_tokens=100_000, logprobs=20)], 1 << 20)
    estimate = int(caught.value.problem.split(" bytes")[0].rsplit(" ", 1)[1])
    assert 0.9 < estimate / (100 * choice.ByteSize()) < 1.1


async def test_one_generation_of_a_batch_is_too_large(
    pair: Any, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, 10_000)
    generations = [generation(max_tokens=2), generation(max_tokens=100_000, logprobs=20)]
    answers = {
        answer.index: answer
        async for answer in stub.GenerateBatch(pb.GenerateBatchRequest(generations=generations))
    }
    assert answers[0].HasField("response")
    assert answers[1].error.reason == "ANSWER_TOO_LARGE"
    assert not any(len(call.sequence.token_ids) == 100_000 for call in pair["d1"].calls)


async def test_an_answer_that_grows_too_large_ends_at_once(
    pair: Any, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, 200)
    pair.script.answer = [5] * 50
    caught = await error_of(stub.Generate(pb.GenerateRequest(generation=generation(n=8))))
    assert refusal(caught).field == "stopping.max_tokens"
    assert pair.metric("quire_router_requests_running") == 0
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=generation(n=8)))
    assert len([message async for message in call]) > 8


async def test_a_message_of_a_stream_that_is_too_large_is_no_success(
    pair: Any, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMIT, 100)
    pair.script.answer = [5] * 50
    call = stub.GenerateStream(pb.GenerateStreamRequest(generation=generation(best_of=2, logprobs=0)))
    assert refusal(await error_of(call)).reason == "ANSWER_TOO_LARGE"


def test_a_long_prompts_logprobs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"response\.prompt_logprobs: those of 100000 tokens"):
        PromptLogprobs().add_request(prompt(100_000, 20))
    PromptLogprobs().add_request(prompt(100_000, None))
    PromptLogprobs().add_request(prompt(10_000, 20))


def test_the_logprobs_of_all_prompts_of_one_message_are_added_up() -> None:
    sizes = PromptLogprobs()
    for _ in range(2):
        sizes.add_request(prompt(30_000, 20))
    with pytest.raises(InvalidArgument, match="those of 90000 tokens"):
        sizes.add_request(prompt(30_000, 20))
    with pytest.raises(InvalidArgument, match="stream the answer"):
        check_answer_size([generation(max_tokens=2000, logprobs=20)] * 64, 4096)
