"""When a step counts as stalled, and when it does not."""

from __future__ import annotations

import pytest

from quire.engine.step_watch import STALL_SECONDS, STALL_STEPS, TICK_SECONDS, StepWatch


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait(watch: StepWatch, clock: Clock, seconds: float) -> None:
    """Let time pass while the event loop looks."""
    for _ in range(round(seconds / TICK_SECONDS)):
        clock.now += TICK_SECONDS
        watch.observe()


def test_a_step_that_does_not_end_is_stalled_and_then_stuck(clock: Clock) -> None:
    watch = StepWatch(60.0, clock=clock)
    watch.begin()
    wait(watch, clock, STALL_SECONDS - 1)
    assert not watch.is_stalled
    wait(watch, clock, 2)
    assert watch.is_stalled
    assert not watch.is_stuck
    wait(watch, clock, 60)
    assert watch.is_stuck


def test_steps_that_end_and_rest_are_no_stall(clock: Clock) -> None:
    watch = StepWatch(60.0, clock=clock)
    for _ in range(5):
        watch.begin()
        wait(watch, clock, STALL_SECONDS - 1)
        watch.end_step()
    watch.rest()
    wait(watch, clock, 1000)
    watch.begin()
    assert not watch.is_stalled


@pytest.mark.parametrize("is_measured_at_start", [True, False])
def test_a_slow_engine_may_take_its_time(clock: Clock, is_measured_at_start: bool) -> None:
    step_seconds = 7.0
    watch = StepWatch(60.0, step_seconds if is_measured_at_start else 0.0, clock)
    if not is_measured_at_start:
        watch.begin()
        wait(watch, clock, step_seconds)
        watch.end_step()
    watch.begin()
    wait(watch, clock, STALL_STEPS * step_seconds - 1)
    assert not watch.is_stalled
    wait(watch, clock, 2)
    assert watch.is_stuck


def test_one_long_step_is_forgotten(clock: Clock) -> None:
    watch = StepWatch(60.0, clock=clock)
    watch.begin()
    wait(watch, clock, 20)
    watch.end_step()
    for _ in range(200):
        watch.begin()
        watch.end_step()
    watch.begin()
    wait(watch, clock, STALL_SECONDS + 1)
    assert watch.is_stalled


def test_a_process_that_was_stopped_itself_is_not_stalled(clock: Clock) -> None:
    watch = StepWatch(5.0, clock=clock)
    watch.begin()
    watch.observe()
    clock.now += 1000.0
    watch.observe()
    assert not watch.is_stalled
