"""Logprobs in OpenAI's forms: the names of tokens, the top ones, and numbers that JSON can have."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from quire.protos import inference_pb2 as pb
from quire.services.router.http.openai.answer_bodies import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Usage,
)
from quire.services.router.http.openai.logprobs import (
    LEAST_LOGPROB,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from quire.services.router.http.shared.json_text import SLICE_MEMBERS, is_large, to_json, to_json_in_steps
from quire.tokenization.tokenizer import Tokenizer


def logprobs(logprob: float, *top: tuple[int, float]) -> pb.TokenLogprobs:
    candidates = [pb.CandidateLogprob(token_id=token_id, logprob=value) for token_id, value in top]
    return pb.TokenLogprobs(logprob=logprob, top=candidates)


@pytest.fixture
async def word(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text whose last character has several tokens."""
    return list(await tokenizer.encode("hi 🎉", add_special_tokens=False))


@pytest.fixture
def names(tokenizer: Tokenizer) -> TokenNames:
    return TokenNames(tokenizer, as_ids=False)


def test_a_part_of_a_character_has_no_bytes(names: TokenNames, word: list[int]) -> None:
    texts = [names[token_id] for token_id in word]
    assert texts[0] == "h" or texts[0].startswith("hi")
    parts = [token_id for token_id, text in zip(word, texts, strict=True) if "\ufffd" in text]
    assert len(parts) > 1
    assert all(names.bytes(token_id) is None for token_id in parts)
    assert names.bytes(word[0]) == list(texts[0].encode())


def test_names_as_ids_are_exact_and_texts_stay_texts(tokenizer: Tokenizer, word: list[int]) -> None:
    as_ids = TokenNames(tokenizer, as_ids=True)
    assert as_ids[word[0]] == f"token_id:{word[0]}"
    assert as_ids.text(word[0]) == TokenNames(tokenizer, as_ids=False)[word[0]]


def test_of_tokens_with_one_name_the_most_probable_counts(names: TokenNames, word: list[int]) -> None:
    first, second = [token_id for token_id in word if "\ufffd" in names[token_id]][:2]
    assert names[first] == names[second]
    top = logprobs(-3.0, (second, -1.0), (first, -2.0))
    [found] = completion_logprobs(names, [first], [top], [0]).top_logprobs
    assert found == {names[first]: -1.0}


def test_the_own_token_is_among_the_top_ones_even_if_it_is_not(names: TokenNames) -> None:
    top = logprobs(-9.0, (40, -0.5))
    [found] = completion_logprobs(names, [41], [top], [3]).top_logprobs
    assert found == {names[40]: -0.5, names[41]: -9.0}


def test_every_list_has_a_member_for_each_token(names: TokenNames) -> None:
    each: Sequence[pb.TokenLogprobs | None] = [None, logprobs(-1.0)]
    found = completion_logprobs(names, [40, 41], each, [0, 1])
    assert found.token_logprobs == [None, -1.0]
    assert found.top_logprobs == [None, {names[41]: -1.0}]
    assert (len(found.tokens), found.text_offset) == (2, [0, 1])
    with pytest.raises(ValueError, match="zip"):
        completion_logprobs(names, [40], each, [0])


def test_an_impossible_token_has_a_number_that_json_has(names: TokenNames) -> None:
    impossible = logprobs(-math.inf, (40, -math.inf))
    written = [
        to_json(completion_logprobs(names, [41], [impossible], [0])),
        to_json(chat_logprobs(names, [41], [impossible])),
    ]
    for text in written:
        json.loads(text, parse_constant=pytest.fail)
        assert str(LEAST_LOGPROB).encode() in text


def test_a_chats_logprobs_have_the_tokens_in_order(names: TokenNames) -> None:
    found = chat_logprobs(names, [40, 41], [logprobs(-1.0, (40, -1.0), (42, -2.0)), logprobs(-3.0)])
    assert found.content is not None
    assert [(each["token"], each["logprob"], len(each["top_logprobs"])) for each in found.content] == [
        (names[40], -1.0, 2),
        (names[41], -3.0, 0),
    ]


def test_a_prompts_own_token_has_a_rank_only_among_the_top_ones(names: TokenNames) -> None:
    found = prompt_logprobs(
        names, [40, 41, 42], [logprobs(-2.0, (43, -1.0), (41, -2.0)), logprobs(-7.0, (43, -1.0))]
    )
    assert found[0] is None
    ranks = [{key: each["rank"] for key, each in place.items()} for place in found[1:] if place]
    assert ranks == [{"43": 1, "41": 2}, {"43": 1, "42": None}]


@pytest.mark.parametrize("num_tokens", [0, 1, SLICE_MEMBERS, SLICE_MEMBERS + 1])
def test_json_in_steps_is_the_same_json(names: TokenNames, num_tokens: int) -> None:
    ids = [40] * num_tokens
    scored = [logprobs(-1.25, (40, -0.5), (42, -1e-20))] * num_tokens
    choice = CompletionChoice(index=0, text='a "text" of\nümlauts', finish_reason="stop")
    choice.prompt_logprobs = prompt_logprobs(names, [41, *ids], scored)
    choice.logprobs = completion_logprobs(names, ids, scored, list(range(num_tokens)))
    other = CompletionChoice(index=1, text="", token_ids=ids)
    made: dict[str, Any] = {"id": "x", "created": 1, "model": "m"}
    completion = Completion(object="text_completion", choices=[choice, other], **made)
    message = AnswerMessage(role="assistant", content="a", tool_calls=None)
    answer = ChatChoice(index=0, message=message, logprobs=chat_logprobs(names, ids, scored))
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    chat = ChatCompletion(object="chat.completion", choices=[answer], usage=usage, **made)
    for body in (completion, chat, ChatCompletion(object="chat.completion", choices=[], usage=usage, **made)):
        assert to_json_in_steps(body) == to_json(body)
    assert is_large(completion)
    assert not is_large(Completion(object="text_completion", choices=[other], **made))
