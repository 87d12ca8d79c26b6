"""The messages of one answer for a gateway: chunks that add up to the whole, and what ended it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from quire.protos import inference_pb2 as pb
from quire.protos import worker_pb2
from quire.services.vllm_adapter.answers import AnswerWriter
from quire.tokenization.tokenizer import Tokenizer
from tests.testing.valid_requests import valid_request

STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
UNFINISHED = pb.FINISH_REASON_UNSPECIFIED
PROMPT = [5, 6, 7]


def writer(tokenizer: Tokenizer, params: dict[str, Any] | None = None, **response: Any) -> AnswerWriter:
    return AnswerWriter(valid_request(PROMPT, params, **response), tokenizer, 2)


def tokens(token_ids: list[int]) -> list[worker_pb2.SampledToken]:
    return [
        worker_pb2.SampledToken(
            token_id=each,
            logprobs=pb.TokenLogprobs(
                logprob=-float(each), top=[pb.CandidateLogprob(token_id=each, logprob=-1.0)]
            ),
        )
        for each in token_ids
    ]


@given(token_ids=st.lists(st.integers(2, 300), max_size=12), cuts=st.lists(st.integers(0, 12), max_size=4))
def test_the_chunks_add_up_to_the_whole(tokenizer: Tokenizer, token_ids: list[int], cuts: list[int]) -> None:
    answer = writer(tokenizer, logprobs=1)
    answer.num_cached_tokens = 2
    chunks = []
    for start, end in pairwise(sorted([0, len(token_ids), *(min(cut, len(token_ids)) for cut in cuts)])):
        answer.add(tokens(token_ids[start:end]), UNFINISHED)
        chunks.append(answer.chunk().chunk)
    answer.add([], LENGTH)
    whole = answer.complete().complete
    assert answer.is_finished
    assert [each for chunk in chunks for each in chunk.token_ids] == list(whole.output_ids) == token_ids
    assert sum(chunk.completion_tokens for chunk in chunks) == whole.completion_tokens == len(token_ids)
    logprobs = [each for chunk in chunks for each in chunk.output_logprobs.token_logprobs]
    assert logprobs == list(whole.output_logprobs.token_logprobs) == [-float(each) for each in token_ids]
    assert len(whole.output_logprobs.top_logprobs) == len(token_ids)
    for message in (*chunks, whole):
        assert (message.index, message.prompt_tokens, message.cached_tokens) == (2, len(PROMPT), 2)
    assert whole.finish_reason == "length"


async def test_tokens_after_a_stop_string_are_omitted(tokenizer: Tokenizer) -> None:
    token_ids = await tokenizer.encode("hello world, stop here", add_special_tokens=False)
    answer = writer(tokenizer, stop_strings=("nothing", "stop"))
    answer.add(tokens(token_ids), LENGTH)
    whole = answer.complete().complete
    assert (whole.finish_reason, whole.matched_stop_str) == ("stop", "stop")
    text = tokenizer.decode(list(whole.output_ids))
    assert "stop" in text
    assert "here" not in text


async def test_a_stop_string_can_end_at_the_last_token(tokenizer: Tokenizer) -> None:
    # The rest of the character could still come, so its part is text only at the end.
    [*_, part, _] = await tokenizer.encode("🎉", add_special_tokens=False)
    answer = writer(tokenizer, stop_strings=("\ufffd",))
    answer.add(tokens([part]), UNFINISHED)
    assert not answer.is_finished
    answer.add([], LENGTH)
    whole = answer.complete().complete
    assert (whole.finish_reason, whole.matched_stop_str) == ("stop", "\ufffd")


@pytest.mark.parametrize(
    ("token_ids", "reason", "matched"),
    [([9, 7], STOP, 7), ([9, 1], STOP, None), ([9, 7], LENGTH, None), ([], STOP, None)],
)
def test_only_the_clients_own_stop_token_is_named(
    tokenizer: Tokenizer, token_ids: list[int], reason: pb.FinishReason, matched: int | None
) -> None:
    answer = writer(tokenizer, {"stop_token_ids": frozenset({7})})
    answer.add(tokens(token_ids), reason)
    whole = answer.complete().complete
    which = whole.WhichOneof("matched_stop")
    assert (whole.matched_token_id if which else None) == matched


def test_the_prompts_logprobs_are_sent_once_and_the_first_token_has_none(tokenizer: Tokenizer) -> None:
    answer = writer(tokenizer, prompt_logprobs=1)
    answer.prompt_logprobs = [each.logprobs for each in tokens(PROMPT[1:])]
    answer.add(tokens([9]), UNFINISHED)
    first = answer.chunk().chunk
    answer.add(tokens([9]), LENGTH)
    second = answer.chunk().chunk
    assert not second.HasField("input_logprobs")
    for message in (first, answer.complete().complete):
        found = message.input_logprobs
        assert list(found.token_ids) == PROMPT
        values = [each.value if each.HasField("value") else None for each in found.token_logprobs]
        assert values == [None, -6.0, -7.0]
        assert [len(each.token_ids) for each in found.top_logprobs] == [0, 1, 1]


@pytest.mark.parametrize("number", [None, 0])
def test_no_more_logprobs_are_sent_than_asked_for(tokenizer: Tokenizer, number: int | None) -> None:
    answer = writer(tokenizer, logprobs=number, prompt_logprobs=number)
    answer.prompt_logprobs = [each.logprobs for each in tokens(PROMPT[1:])]
    answer.add(tokens([9]), LENGTH)
    whole: vllm.GenerateComplete = answer.complete().complete
    for part in ("output_logprobs", "input_logprobs"):
        assert whole.HasField(part) == (number is not None)
        assert len(getattr(whole, part).top_logprobs) == 0
