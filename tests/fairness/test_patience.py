"""Requests stand in the order of arrival, moved by priority and by near deadlines, and none for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.fairness.patience import LEVEL_SECONDS, MAX_PRIORITY, patience

PRIORITIES = st.integers(-MAX_PRIORITY, MAX_PRIORITY)
SECONDS = st.none() | st.floats(0, 1000)


@pytest.mark.parametrize(
    ("request_", "other", "is_first"),
    [
        ((0, None), (0, None), True),
        ((-1, None), (0, None), True),
        ((1, None), (0, None), False),
        ((0, 600.0), (0, None), True),
        ((0, 2.0), (0, None), True),
        ((0, 9.0), (0, 2.0), False),
        ((-1, None), (0, 2.0), True),
    ],
)
def test_of_requests_that_arrive_together(
    request_: tuple[int, float | None], other: tuple[int, float | None], is_first: bool
) -> None:
    assert (patience(*request_) <= patience(*other)) == is_first


@given(PRIORITIES, SECONDS, PRIORITIES, SECONDS, st.floats(0, 1000))
def test_waiting_counts_as_much_as_priority(
    priority: int, seconds: float | None, other: int, other_seconds: float | None, later: float
) -> None:
    """A request that arrives later comes first only by as many levels, or by its own near deadline."""
    if later + patience(other, other_seconds) < patience(priority, seconds):
        levels_gained = priority - other
        assert later < LEVEL_SECONDS * levels_gained or other_seconds is not None
        assert later < LEVEL_SECONDS * (1 + priority + MAX_PRIORITY)
