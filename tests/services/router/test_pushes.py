"""The counts of pushes from one worker to another."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from quire.services.router.execution.pushes import PushCount, Pushes


def attempt(prefill: str | None = "p") -> Any:
    worker = None if prefill is None else SimpleNamespace(worker_id=prefill)
    return SimpleNamespace(prefill=worker, decode=SimpleNamespace(worker_id="d"), num_pushed=0)


def test_a_push_runs_until_the_answer_grows_and_each_block_counts_once() -> None:
    pushes, first, second = Pushes(), attempt(), attempt()
    with ExitStack() as stack:
        grown = stack.enter_context(pushes.follow(first))
        stack.enter_context(pushes.follow(second))
        assert grown is not None
        assert pushes.counts == {("p", "d"): PushCount(2, 0)}
        first.num_pushed = 7
        for _ in range(2):
            grown()
            assert pushes.counts == {("p", "d"): PushCount(1, 7)}
        first.num_pushed, second.num_pushed = 8, 1
    assert pushes.counts == {("p", "d"): PushCount(0, 9)}


def test_an_attempt_without_a_prefill_worker_pushes_nothing() -> None:
    pushes = Pushes()
    with pushes.follow(attempt(prefill=None)) as grown:
        assert grown is None
    assert not pushes.counts


def test_a_worker_that_left_is_forgotten_although_an_attempt_still_ends() -> None:
    pushes, running = Pushes(), attempt()
    with pushes.follow(running), pushes.follow(attempt("other")):
        pushes.forget("p")
        running.num_pushed = 5
    assert pushes.counts == {("other", "d"): PushCount(0, 0)}
    pushes.forget("d")
    assert not pushes.counts
