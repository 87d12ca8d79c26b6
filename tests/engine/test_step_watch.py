"""When a step counts as stalled, and when it does not."""

from __future__ import annotations

import pytest

from quire.engine.runner.step_watch import (
    STALL_SECONDS,
    STALL_STEPS,
    TICK_SECONDS,
    UNKNOWN_STALL_SECONDS,
    StepWatch,
)
from quire.engine.sequences.schedule import StepKind
from tests.testing.manual_clock import ManualClock

FULL, SINGLE = StepKind.of(512, 512 * 512), StepKind.of(1, 100)


def wait(watch: StepWatch, clock: ManualClock, seconds: float) -> None:
    """Let time pass while the event loop looks."""
    for _ in range(round(seconds / TICK_SECONDS)):
        clock.now += TICK_SECONDS
        watch.observe()


def begin(watch: StepWatch, clock: ManualClock, kind: StepKind, seconds: float) -> None:
    """Let a step of a kind begin and take some time."""
    watch.begin()
    watch.plan(kind)
    wait(watch, clock, seconds)


def run_step(watch: StepWatch, clock: ManualClock, kind: StepKind, seconds: float) -> None:
    begin(watch, clock, kind, seconds)
    watch.end_step()


def test_a_step_that_does_not_end_is_stalled_and_then_stuck(clock: ManualClock) -> None:
    watch = StepWatch(60.0, clock=clock)
    watch.begin()
    wait(watch, clock, UNKNOWN_STALL_SECONDS - 1)
    assert not watch.is_stalled
    wait(watch, clock, 2)
    assert watch.is_stalled
    assert not watch.is_stuck
    wait(watch, clock, 60)
    assert watch.is_stuck


def test_steps_that_end_and_rest_are_no_stall(clock: ManualClock) -> None:
    watch = StepWatch(60.0, clock=clock)
    for _ in range(5):
        watch.begin()
        wait(watch, clock, UNKNOWN_STALL_SECONDS - 1)
        watch.end_step()
    watch.rest()
    wait(watch, clock, 1000)
    watch.begin()
    assert not watch.is_stalled


@pytest.mark.parametrize("is_measured_at_start", [True, False])
def test_a_slow_engine_has_a_longer_limit(clock: ManualClock, is_measured_at_start: bool) -> None:
    step_seconds = 7.0
    watch = StepWatch(60.0, {FULL: step_seconds} if is_measured_at_start else {}, clock)
    if not is_measured_at_start:
        run_step(watch, clock, FULL, step_seconds)
    begin(watch, clock, FULL, STALL_STEPS * step_seconds - 1)
    assert not watch.is_stalled
    wait(watch, clock, 2)
    assert watch.is_stuck


def test_one_long_step_is_forgotten(clock: ManualClock) -> None:
    watch = StepWatch(60.0, clock=clock)
    watch.begin()
    wait(watch, clock, 20)
    watch.end_step()
    for _ in range(200):
        watch.begin()
        watch.end_step()
    watch.begin()
    wait(watch, clock, UNKNOWN_STALL_SECONDS + 1)
    assert watch.is_stalled


def test_a_process_that_was_stopped_itself_is_not_stalled(clock: ManualClock) -> None:
    watch = StepWatch(5.0, clock=clock)
    watch.begin()
    watch.observe()
    clock.now += 1000.0
    watch.observe()
    assert not watch.is_stalled


def test_a_short_step_that_hangs_is_noticed_soon_although_others_are_long(clock: ManualClock) -> None:
    watch = StepWatch(60.0, {FULL: 6.0}, clock)
    run_step(watch, clock, SINGLE, 0.1)
    begin(watch, clock, SINGLE, STALL_SECONDS + 0.3)
    assert watch.is_stalled
    run_step(watch, clock, FULL, 6.0)
    assert not watch.is_stalled


def test_a_step_of_a_new_kind_is_judged_by_the_next_larger_one(clock: ManualClock) -> None:
    watch = StepWatch(60.0, {FULL: 1.0}, clock)
    run_step(watch, clock, StepKind.of(100, 5_000), 0.3)
    begin(watch, clock, SINGLE, STALL_STEPS * 0.3 - 0.3)
    assert not watch.is_stalled
    wait(watch, clock, 0.6)
    assert watch.is_stalled


@pytest.mark.parametrize("kind", [StepKind.of(1024, 512), StepKind.of(1, 1 << 30)])
def test_a_step_that_is_larger_than_all_before_gets_more_time(clock: ManualClock, kind: StepKind) -> None:
    watch = StepWatch(60.0, {FULL: 0.1}, clock)
    begin(watch, clock, kind, UNKNOWN_STALL_SECONDS - 1)
    assert not watch.is_stalled
    wait(watch, clock, 2)
    assert watch.is_stalled


def test_the_time_of_a_long_step_does_not_count_for_the_next_one(clock: ManualClock) -> None:
    watch = StepWatch(60.0, {FULL: 3.0, SINGLE: 0.01}, clock)
    run_step(watch, clock, FULL, 3.0)
    watch.begin()
    watch.plan(SINGLE)
    assert not watch.is_stalled
    wait(watch, clock, STALL_SECONDS - TICK_SECONDS)
    assert not watch.is_stalled
    wait(watch, clock, 3 * TICK_SECONDS)
    assert watch.is_stalled
