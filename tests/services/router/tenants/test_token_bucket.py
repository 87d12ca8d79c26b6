"""A token bucket: what it lets through in any time, and when it says to come again."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from quire.services.router.tenants.token_bucket import TokenBucket
from tests.testing.manual_clock import ManualClock

ROUNDING = 1e-3
pauses = st.floats(0, 100, allow_nan=False)


@given(st.integers(1, 10_000), st.lists(st.tuples(pauses, st.floats(0, 1)), max_size=40))
def test_no_time_brings_more_than_its_due(per_minute: int, calls: list[tuple[float, float]]) -> None:
    clock = ManualClock()
    bucket = TokenBucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for pause, share in calls:
        clock.now += pause
        num_tokens = round(share * per_minute)
        if not bucket.wait_seconds(num_tokens):
            bucket.spend(num_tokens)
            taken.append((clock.now, num_tokens))
    for begin, (since, _) in enumerate(taken):
        for (until, _), total in zip(taken[begin:], accumulate(n for _, n in taken[begin:]), strict=True):
            assert total <= per_minute + per_minute / 60 * (until - since) + ROUNDING


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(pauses, st.integers(0, 20_000)), max_size=20),
    st.integers(1, 20_000),
)
def test_the_wait_is_exact(per_minute: int, spent: list[tuple[float, int]], wanted: int) -> None:
    clock = ManualClock()
    bucket = TokenBucket(per_minute, clock)
    for pause, num_tokens in spent:
        clock.now += pause
        bucket.spend(num_tokens)
    if wait := bucket.wait_seconds(wanted):
        clock.now += 0.9 * wait
        assert bucket.wait_seconds(wanted) > 0
        clock.now += 0.1 * wait
    assert bucket.wait_seconds(wanted) <= ROUNDING


def test_debt_is_paid_first_and_a_full_bucket_admits_more_than_its_capacity() -> None:
    clock = ManualClock()
    bucket = TokenBucket(60, clock)
    assert bucket.wait_seconds(600) == 0
    bucket.spend(600)
    assert bucket.wait_seconds(0) == 540
    clock.now += 541
    assert bucket.wait_seconds(1) == 0
    assert bucket.wait_seconds(600) == 59
