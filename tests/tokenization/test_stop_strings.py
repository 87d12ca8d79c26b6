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
def test_pieces_give_what_the_whole_gives(pieces: list[str], stops: list[str]) -> None:
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


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        ("\n\n", ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        ("aab", ["a", "a", "a", "b"], ["", "", "a", ""]),
        ("end", ["the e", "agle"], ["the ", "eagl"]),
    ],
)
def test_only_what_may_begin_a_stop_is_held_back(stop: str, pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher([stop])
    assert [matcher.feed(piece).text for piece in pieces] == shown
