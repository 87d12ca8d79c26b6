"""Bad words as token ids: the limits, the two forms of a text, and words that are there twice."""

from __future__ import annotations

from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from quire.services.requests import bad_words as module
from quire.services.requests.bad_words import MAX_BAD_WORD_LENGTH, MAX_BAD_WORDS, bad_words
from quire.tokenization.tokenizer import Tokenizer

VOCAB_SIZE = 320


def params(words: list[str] | None = None, ids: list[list[int]] | None = None) -> pb.SamplingParams:
    return pb.SamplingParams(
        bad_words=words, bad_word_token_ids=[pb.TokenIds(ids=each) for each in ids or []]
    )


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_text_is_forbidden_at_the_start_of_a_word_too(
    tokenizer: Tokenizer, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_long:
        monkeypatch.setattr(module, "INLINE_ENCODE_CHARS", 3)
    found = await bad_words(params([" stop", "stop"], [[9, 8]]), tokenizer, VOCAB_SIZE)
    assert [tokenizer.decode(list(each)) for each in found[:2]] == ["stop", " stop"]
    assert found[2:] == ((9, 8),), "the second text is the first one again"


async def test_no_words_are_no_words(tokenizer: Tokenizer) -> None:
    assert await bad_words(params(), tokenizer, VOCAB_SIZE) == ()


@pytest.mark.parametrize(
    ("sent", "field", "problem"),
    [
        (params(["a"] * (MAX_BAD_WORDS + 1)), "sampling.bad_words", "at most 128; got 129"),
        (params(ids=[[5]] * (MAX_BAD_WORDS + 1)), "sampling.bad_word_token_ids", "at most 128; got 129"),
        (params(["a", " "]), "sampling.bad_words[1]", "from 1 to 256 characters; got 0"),
        (params(["x" * 257]), "sampling.bad_words[0]", "from 1 to 256 characters; got 257"),
        (params(ids=[[5], []]), "sampling.bad_word_token_ids[1]", "from 1 to 256 token ids; got 0"),
        (params(ids=[[5] * 257]), "sampling.bad_word_token_ids[0]", "from 1 to 256 token ids; got 257"),
        (params(ids=[[5, 320]]), "sampling.bad_word_token_ids[0]", "must be below 320; got 320"),
    ],
)
async def test_the_limits_are_named(tokenizer: Tokenizer, sent: Any, field: str, problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await bad_words(sent, tokenizer, VOCAB_SIZE)
    assert caught.value.field == field
    assert problem in caught.value.problem


async def test_the_limits_themselves_are_allowed(tokenizer: Tokenizer) -> None:
    longest = [[5] * MAX_BAD_WORD_LENGTH, *([each] for each in range(MAX_BAD_WORDS - 1))]
    found = await bad_words(params(["x" * MAX_BAD_WORD_LENGTH], longest), tokenizer, VOCAB_SIZE)
    assert len(found) == 2 + MAX_BAD_WORDS
