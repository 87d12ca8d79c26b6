"""Text from tokens, cut at a stop string wherever the tokens break it."""

from __future__ import annotations

import pytest

from quire.tokenization.stop_strings import Fed
from quire.tokenization.stopping_decoder import StoppingDecoder
from quire.tokenization.tokenizer import Tokenizer


def run(decoder: StoppingDecoder, token_ids: list[int]) -> tuple[str, str | None, int]:
    """Return the text, the stop string and how many tokens were taken."""
    text = ""
    for count, token_id in enumerate(token_ids, start=1):
        fed = decoder.step(token_id)
        text += fed.text
        if fed.is_stopped:
            return text, fed.stop, count
    fed = decoder.flush()
    return text + fed.text, fed.stop, len(token_ids)


@pytest.mark.parametrize("stop", ["wor", "o w", " world, st", "é!"])
def test_a_stop_string_across_tokens_is_found(tokenizer: Tokenizer, stop: str) -> None:
    whole = "hello world, stop here é!"
    [ids] = tokenizer.encode_batch([whole], add_special_tokens=False)
    text, found, num_taken = run(StoppingDecoder(tokenizer, [stop, "nowhere"]), ids)
    assert (text, found) == (whole[: whole.index(stop)], stop)
    assert stop in tokenizer.decode(ids[:num_taken])
    assert stop not in tokenizer.decode(ids[: num_taken - 1])


def test_an_incomplete_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode_batch(["hello world"], add_special_tokens=False)
    assert run(StoppingDecoder(tokenizer, ["world!"]), ids) == ("hello world", None, len(ids))


def test_stop_strings_wait_for_the_least_number_of_tokens(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode_batch(["aaaaa"], add_special_tokens=False)
    assert run(StoppingDecoder(tokenizer, ["a"], min_tokens=3), ids) == ("aaa", "a", 4)
    assert run(StoppingDecoder(tokenizer, ["a"], min_tokens=9), ids) == ("aaaaa", None, 5)


def test_the_stop_string_can_be_kept(tokenizer: Tokenizer) -> None:
    [ids] = tokenizer.encode_batch(["hello world"], add_special_tokens=False)
    assert run(StoppingDecoder(tokenizer, ["o w"], keep_stop_string=True), ids)[:2] == ("hello w", "o w")
    assert run(StoppingDecoder(tokenizer, ["x"], keep_stop_string=True), ids)[:2] == ("hello world", None)


def test_special_tokens_are_skipped_or_kept(tokenizer: Tokenizer) -> None:
    assert run(StoppingDecoder(tokenizer, ["</s>"]), [0, 1])[:2] == ("", None)
    kept = StoppingDecoder(tokenizer, ["</s>"], skip_special_tokens=False)
    assert run(kept, [0, 1])[:2] == ("<s>", "</s>")


@pytest.mark.parametrize("stop_strings", [[], ["wor", "nowhere"], ["o w"], ["é!"]])
@pytest.mark.parametrize("min_tokens", [0, 3, 30])
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_several_tokens_end_where_each_in_turn_does(
    tokenizer: Tokenizer, stop_strings: list[str], min_tokens: int, size: int
) -> None:
    [ids] = tokenizer.encode_batch(["hello world, stop here é!"], add_special_tokens=False)
    decoder = StoppingDecoder(tokenizer, stop_strings, min_tokens=min_tokens)
    text, num_taken, fed = "", 0, Fed("")
    for start in range(0, len(ids), size):
        fed, taken = decoder.feed(ids[start : start + size])
        text, num_taken = text + fed.text, num_taken + taken
        if fed.is_stopped:
            break
    else:
        fed = decoder.flush()
        text += fed.text
    in_turn = StoppingDecoder(tokenizer, stop_strings, min_tokens=min_tokens)
    assert (text, fed.stop, num_taken) == run(in_turn, ids)
