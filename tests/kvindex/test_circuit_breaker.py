"""The circuit breaker: when it refuses attempts, and how often it tries again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.kvindex.circuit_breaker import BreakerState, CircuitBreaker
from tests.testing.manual_clock import ManualClock

MAX_FAILURES, OPEN_SECONDS = 3, 10.0


def breaker(clock: ManualClock) -> CircuitBreaker:
    return CircuitBreaker(MAX_FAILURES, OPEN_SECONDS, clock)


def test_it_opens_after_max_failures_in_a_row() -> None:
    clock = ManualClock()
    guard = breaker(clock)
    for _ in range(2):
        assert [guard.failed() for _ in range(MAX_FAILURES - 1)] == [False] * (MAX_FAILURES - 1)
        guard.succeeded()
    assert [guard.failed() for _ in range(MAX_FAILURES)] == [False, False, True]
    assert guard.state is BreakerState.OPEN
    assert not guard.admits()


def test_while_it_is_open_it_admits_one_trial_each_time() -> None:
    clock = ManualClock()
    guard = breaker(clock)
    for _ in range(MAX_FAILURES):
        guard.failed()
    clock.now += OPEN_SECONDS - 0.5
    assert not guard.admits()
    clock.now += 0.5
    state = guard.state
    assert state is BreakerState.HALF_OPEN
    assert [guard.admits() for _ in range(3)] == [True, False, False]
    # The trial never reports, and the next one is due after the same time.
    clock.now += OPEN_SECONDS
    assert [guard.admits() for _ in range(3)] == [True, False, False]
    assert not guard.failed(), "it was open already"
    guard.succeeded()
    assert guard.state is BreakerState.CLOSED
    assert [guard.admits() for _ in range(3)] == [True] * 3


@given(steps=st.lists(st.sampled_from(["fail", "succeed", "wait"]), max_size=60))
def test_it_refuses_only_after_failures_and_never_for_long(steps: list[str]) -> None:
    clock = ManualClock()
    guard = breaker(clock)
    num_failed, refused_since = 0, None
    for step in steps:
        if step == "wait":
            clock.now += OPEN_SECONDS / 4
        elif guard.admits():
            refused_since = None
            if step == "fail":
                num_failed += 1
                assert guard.failed() == (num_failed == MAX_FAILURES)
            else:
                num_failed = 0
                guard.succeeded()
        else:
            assert num_failed >= MAX_FAILURES
            refused_since = clock.now if refused_since is None else refused_since
            assert clock.now - refused_since < OPEN_SECONDS
