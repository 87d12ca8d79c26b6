"""Laps split the time of a step without gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.runner.step_clock import PHASES, StepClock


@given(st.lists(st.floats(0.0, 10.0), max_size=8), st.floats(0.0, 100.0))
def test_laps_follow_each_other_without_gaps(durations: list[float], start: float) -> None:
    now = start
    clock = StepClock(lambda: now)
    clock.start()
    for seconds in durations:
        now += seconds
        assert clock.lap() == pytest.approx(seconds, abs=1e-9)
        assert clock.lap_began_at == now


def test_a_new_step_forgets_the_last_one() -> None:
    times = iter([1.0, 4.0, 10.0, 12.0])
    clock = StepClock(lambda: next(times))
    clock.start()
    assert clock.lap("forward") == clock.seconds["forward"] == 3.0
    clock.start()  # the time between two steps belongs to neither
    assert clock.lap() == 2.0
    assert clock.seconds == {**dict.fromkeys(PHASES, 0.0), "forward": 3.0}
