"""The messages of one answer: their text, their tokens, and how the answer ends."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.protos import inference_pb2 as pb
from quire.services.requests.division import Division
from quire.services.router.outputs.dividing_decoder import joined
from quire.services.router.outputs.output import OutputAssembler
from quire.services.router.workers.answer_part import AnswerPart
from quire.tokenization.answers.formats import HERMES, AnswerFormat, Delimiters
from quire.tokenization.answers.parser import AnswerParser
from quire.tokenization.tokenizer import Tokenizer
from tests.testing.valid_requests import valid_request

EOS = 1
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
UNFINISHED = pb.FINISH_REASON_UNSPECIFIED


def assembler(
    tokenizer: Tokenizer,
    params: dict[str, Any] | None = None,
    division: Division | None = None,
    prompt_field: str = "text",
    **response: Any,
) -> OutputAssembler:
    return OutputAssembler(valid_request([5], params, division, prompt_field, **response), tokenizer)


def part(token_ids: list[int], finish_reason: pb.FinishReason = UNFINISHED) -> AnswerPart:
    logprobs = [pb.TokenLogprobs(logprob=-0.5)] * len(token_ids)
    return AnswerPart(token_ids, logprobs, finish_reason=finish_reason)


@pytest.mark.parametrize(("prompt_field", "text"), [("text", " a b"), ("token_ids", " a b"), ("chat", "a b")])
def test_only_the_answer_to_a_chat_begins_a_text(prompt_field: str, text: str) -> None:
    words = {"<unk>": 0, "▁a": 3, "▁b": 4, "▁c": 5}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    replace, strip = tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Strip(" ", 1, 0)
    inner.decoder = tokenizers.decoders.Sequence([replace, tokenizers.decoders.Fuse(), strip])
    answer = assembler(Tokenizer(inner), prompt_field=prompt_field)
    assert answer.respond(part([3, 4])).text == text


TEXT = "hello world, stop here and say the end"


@given(
    cuts=st.lists(st.integers(0, 40), max_size=5), stop=st.sampled_from(["stop", "the", "none of it", "end."])
)
async def test_the_messages_are_the_answer_however_the_worker_splits_it(
    tokenizer: Tokenizer, cuts: list[int], stop: str
) -> None:
    token_ids = await tokenizer.encode(TEXT, add_special_tokens=False)
    answer = assembler(tokenizer, stop_strings=(stop,), logprobs=0)
    places = sorted({0, len(token_ids), *(min(cut, len(token_ids)) for cut in cuts)})
    responses = []
    for start, end in pairwise(places):
        is_last = end == len(token_ids)
        responses.append(answer.respond(part(token_ids[start:end], LENGTH if is_last else UNFINISHED)))
        if answer.finish_reason:
            break
    expected, found, _ = TEXT.partition(stop)
    assert "".join(each.text for each in responses) == expected
    assert answer.finish_reason == responses[-1].finish_reason == (STOP if found else LENGTH)
    sent = [token_id for each in responses for token_id in each.token_ids]
    assert sent == answer.token_ids == token_ids[: len(sent)]
    assert sum(len(each.logprobs) for each in responses) == len(sent)
    assert answer.cumulative_logprob == -0.5 * len(sent)


async def test_logprobs_are_sent_only_if_they_were_asked_for(tokenizer: Tokenizer) -> None:
    answer = assembler(tokenizer)
    assert len(answer.respond(part([5, 6])).logprobs) == 0
    assert answer.cumulative_logprob == -1.0, "the best of several answers are ranked by it"


def test_a_score_is_passed_on_even_if_it_is_zero(tokenizer: Tokenizer) -> None:
    scored = part([5], STOP)
    scored.score = 0.0
    assert assembler(tokenizer).respond(scored).HasField("score")
    assert not assembler(tokenizer).respond(part([5], STOP)).HasField("score")


@pytest.mark.parametrize(
    ("params", "token_ids", "reason"),
    [
        ({}, [], UNFINISHED),
        ({}, [5], UNFINISHED),
        ({}, [EOS], STOP),
        ({"ignore_eos": True}, [EOS], UNFINISHED),
        ({"ignore_eos": True, "stop_token_ids": frozenset({EOS})}, [EOS], STOP),
        ({"stop_token_ids": frozenset({7})}, [5, 7], STOP),
        ({"stop_token_ids": frozenset({7})}, [7, 5], UNFINISHED),
        ({"min_tokens": 2}, [EOS], UNFINISHED),
        ({"min_tokens": 2}, [5, EOS], STOP),
        ({"max_tokens": 2}, [5, 6], LENGTH),
        ({"max_tokens": 2}, [5, EOS], STOP),
    ],
)
def test_the_tokens_say_whether_a_lost_answer_was_complete(
    tokenizer: Tokenizer, params: dict[str, Any], token_ids: list[int], reason: pb.FinishReason
) -> None:
    answer = assembler(tokenizer, params)
    answer.respond(part(token_ids))
    assert answer.implied_finish_reason(frozenset({EOS})) == reason


FORMAT = AnswerFormat(Delimiters("<think>\n", "\n</think>"), HERMES)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é🙂"}}\n</tool_call>'


def division(*stop_strings: str, streams_arguments: bool = True) -> Division:
    new_parser = partial(
        AnswerParser,
        FORMAT,
        prompt_tail="<think>",
        schemas={"f": {}},
        stop_strings=stop_strings,
        streams_arguments=streams_arguments,
    )
    return Division(new_parser, None, "")


def parts_of(messages: list[pb.GenerateStreamResponse]) -> list[pb.Piece]:
    return joined(piece for each in messages for piece in each.pieces)


@given(
    cuts=st.lists(st.integers(0, 120), max_size=6),
    resumed_at=st.integers(1, 110),
    streams_arguments=st.booleans(),
)
async def test_a_divided_answer_is_the_same_however_it_is_split_or_continued(
    tokenizer: Tokenizer, cuts: list[int], resumed_at: int, streams_arguments: bool
) -> None:
    made = division(streams_arguments=streams_arguments)
    token_ids = [*await tokenizer.encode(f"say\n</think>\n\nhello 🙂\n{CALL}", add_special_tokens=False), EOS]
    [whole] = [assembler(tokenizer, division=made).respond(part(token_ids, STOP))]
    assert whole.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    assert whole.text == tokenizer.decode(token_ids, skip_special_tokens=False)
    assert sum(piece.num_tokens for piece in whole.pieces) == len(token_ids)
    [call] = [piece.tool_call for piece in joined(whole.pieces) if piece.tool_call.name]
    assert (call.name, call.arguments, len(call.id)) == ("f", '{"a": "é🙂"}', len("call_") + 24)

    answer = assembler(tokenizer, division=made)
    resumed_at = min(resumed_at, len(token_ids) - 1)
    places = sorted({0, len(token_ids), resumed_at, *(min(cut, len(token_ids)) for cut in cuts)})
    messages: list[pb.GenerateStreamResponse] = []
    for start, end in pairwise(places):
        if start == resumed_at:
            # Another router goes on with what the client has received.
            received = pb.ReceivedAnswer(token_ids=token_ids[:start])
            received.num_characters = sum(len(each.text) for each in messages)
            answer = assembler(tokenizer, division=made)
            answer.resume(received)
        is_last = end == len(token_ids)
        messages.append(answer.respond(part(token_ids[start:end], STOP if is_last else UNFINISHED)))
    assert "".join(each.text for each in messages) == whole.text
    assert parts_of(messages) == parts_of([whole])
    assert messages[-1].finish_reason == whole.finish_reason
    num_reasoning = sum(piece.num_tokens for piece in whole.pieces if piece.HasField("reasoning"))
    assert answer.num_reasoning_tokens == num_reasoning > 0


async def test_a_stop_string_ends_only_content_and_is_named(tokenizer: Tokenizer) -> None:
    token_ids = await tokenizer.encode("say stop\n</think>\n\nhello stop here", add_special_tokens=False)
    answer = assembler(tokenizer, division=division("stop"), stop_strings=("stop",))
    response = answer.respond(part(token_ids))
    assert (response.finish_reason, response.stop_string) == (STOP, "stop")
    assert response.text.endswith("hello stop")
    texts = [(piece.reasoning, piece.content.strip()) for piece in parts_of([response])]
    assert texts == [("say stop", ""), ("", "hello")]
    assert sum(piece.num_tokens for piece in response.pieces) == len(response.token_ids) < len(token_ids)
    undivided = assembler(tokenizer, stop_strings=("stop",)).respond(part(token_ids))
    assert (undivided.text, undivided.stop_string) == ("say ", "stop")


async def test_a_stop_string_that_could_begin_a_call_is_kept(tokenizer: Tokenizer) -> None:
    token_ids = await tokenizer.encode("</think>\n\nhello <", add_special_tokens=False)
    answer = assembler(tokenizer, division=division("<"), stop_strings=("<",), keep_stop_string=True)
    response = answer.respond(part(token_ids, LENGTH))
    assert (response.finish_reason, response.stop_string) == (STOP, "<")
    assert "".join(piece.content for piece in response.pieces) == "hello <"


async def test_a_cut_call_is_no_call_that_ended(tokenizer: Tokenizer) -> None:
    token_ids = await tokenizer.encode(f"</think>\n\n{CALL}", add_special_tokens=False)
    response = assembler(tokenizer, division=division()).respond(part(token_ids[:-20], LENGTH))
    assert response.finish_reason == LENGTH


@pytest.mark.parametrize("size", [1, 2, 50])
async def test_a_character_that_is_cut_is_in_the_pieces(tokenizer: Tokenizer, size: int) -> None:
    token_ids = await tokenizer.encode("</think>\n\nhello \U0001f30d", add_special_tokens=False)
    token_ids = token_ids[:-1]
    answer = assembler(tokenizer, division=division())
    sent = [answer.respond(part(token_ids[at : at + size])) for at in range(0, len(token_ids), size)]
    sent.append(answer.respond(part([], LENGTH)))
    text = "".join(response.text for response in sent)
    assert text.endswith("\ufffd")
    pieces = parts_of(sent)
    assert "".join(piece.content for piece in pieces) == text.removeprefix("</think>\n\n")
    assert sum(piece.num_tokens for piece in pieces) == len(token_ids)
