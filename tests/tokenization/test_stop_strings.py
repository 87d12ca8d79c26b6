"""Stop strings, found in pieces as in the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tokenization.stop_strings import StopMatcher


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Search every beginning of the text, shortest first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


letters = st.text("abc", max_size=4)


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(letters.filter(bool), max_size=4))
def test_the_split_of_a_text_does_not_matter(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, is_stopped = StopMatcher(stops), "", False
    for piece in pieces:
        fed = matcher.feed(piece)
        shown += fed.text
        is_stopped = fed.is_stopped
        if is_stopped:
            break
    else:
        shown += matcher.flush()
    assert (shown, is_stopped) == naive("".join(pieces), stops)


@pytest.mark.parametrize("stop", ["a" * 255 + "b", "ab" * 128, "b" + "a" * 255])
@pytest.mark.parametrize("piece", ["a", "ab", "a" * 300])
def test_long_stop_strings_are_found(stop: str, piece: str) -> None:
    pieces = [*[piece] * 300, "b" + stop[:-1], stop[-1] + "c"]
    matcher = StopMatcher([stop, "never"])
    shown, is_stopped = "", False
    for each in pieces:
        if not is_stopped:
            fed = matcher.feed(each)
            shown, is_stopped = shown + fed.text, fed.is_stopped
    assert (shown, is_stopped) == (naive("".join(pieces), [stop]))


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        ("\n\n", ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        ("aab", ["a", "a", "a", "b"], ["", "", "a", ""]),
        ("end", ["the e", "agle"], ["the ", "eagl"]),
    ],
)
def test_only_a_possible_beginning_of_a_stop_string_is_held_back(
    stop: str, pieces: list[str], shown: list[str]
) -> None:
    matcher = StopMatcher([stop])
    assert [matcher.feed(piece).text for piece in pieces] == shown
