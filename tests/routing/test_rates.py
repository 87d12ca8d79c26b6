"""Estimates of the workers' speeds: their bounds, and what has weight in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.routing.rates import HALF_LIFE_SECONDS, Rates
from tests.testing.manual_clock import ManualClock

INITIAL = 100.0


amounts = st.floats(1.0, 1e9)
pieces = st.lists(
    st.tuples(st.sampled_from("abc"), amounts, st.floats(1e-6, 1e3), st.floats(0, 1e4)),
    min_size=1,
    max_size=20,
)


@given(pieces=pieces)
def test_a_rate_is_between_the_slowest_and_the_fastest_piece(
    pieces: list[tuple[str, float, float, float]],
) -> None:
    clock = ManualClock()
    rates = Rates(INITIAL, clock)
    measured = []
    for name, amount, seconds, wait in pieces:
        clock.now += wait
        rates.add(name, amount, seconds)
        measured.append(amount / seconds)
        for each in "abcd":
            assert min(measured) * (1 - 1e-9) <= rates.get(each) <= max(measured) * (1 + 1e-9)


def test_nothing_measured_is_the_initial_rate() -> None:
    rates = Rates(INITIAL, ManualClock())
    assert rates.get("a") == INITIAL
    rates.add("a", 10.0, 0.0)
    assert rates.get("a") == rates.get("b") == INITIAL, "no time was taken, so nothing is known"


def test_the_newest_measurements_count_most() -> None:
    rates = Rates(INITIAL, ManualClock())
    for rate in (10.0, 1000.0):
        for _ in range(30):
            rates.add("a", rate, 1.0)
        assert rates.get("a") == pytest.approx(rate, rel=0.01)


def test_with_time_a_worker_is_taken_for_an_average_one() -> None:
    clock = ManualClock()
    rates = Rates(INITIAL, clock)
    rates.add("fast", 1000.0, 1.0)
    rates.add("slow", 10.0, 1.0)
    average = rates.get("unknown")
    seen = [rates.get("slow")]
    for _ in range(30):
        clock.now += HALF_LIFE_SECONDS
        seen.append(rates.get("slow"))
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(average, rel=0.01)
    assert rates.get("unknown") == average, "time does not change the average"


def test_an_unusual_piece_counts_only_for_its_own_worker() -> None:
    rates = Rates(INITIAL, ManualClock())
    rates.add("a", 1.0, 1.0, is_usual=False)
    assert rates.get("b") == INITIAL
    assert rates.get("a") < INITIAL / 2
    rates.forget("a")
    assert rates.get("a") == INITIAL


def test_a_slow_worker_is_forgiven_with_time(clock: ManualClock) -> None:
    rates = Rates(5.0, clock)
    for _ in range(20):
        rates.add("fast", 100.0, 1.0)
        rates.add("slow", 1.0, 0.1)
    assert rates.get("slow") == pytest.approx(10.0, rel=0.1)
    clock.now += 10 * HALF_LIFE_SECONDS
    assert rates.get("slow") > 70.0
    rates.forget("slow")
    assert rates.get("slow") == rates.get("unknown")
