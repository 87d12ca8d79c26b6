"""A worker that starts again after the system has taken processors away from the stack."""

from __future__ import annotations

import os

import pytest

from quire.services.worker.config import WorkerConfig
from quire.services.worker.main import _warn_of_lost_processors
from quire.services.worker_process import _limit_processors


@pytest.mark.parametrize(
    ("assigned", "lost", "expected"), [((6, 7), "", {6, 7}), ((4, 5, 6), "4-5", {6}), ((5,), "5", {6, 7, 8})]
)
def test_a_worker_runs_on_the_processors_that_are_left(
    assigned: tuple[int, ...],
    lost: str,
    expected: set[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    allowed = {6, 7, 8}

    def limit(process: int, processors: set[int]) -> None:
        assert processors <= allowed, "Linux refuses a set with none of these, and ignores others"
        allowed.intersection_update(processors)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", limit)
    monkeypatch.setattr(os, "environ", {})
    config = WorkerConfig(role="decode", cpus=assigned, threads=1)
    _limit_processors(config)
    assert allowed == expected
    _warn_of_lost_processors(config)
    found = [vars(each)["fields"] for each in caplog.records if each.message == "processors_taken_away"]
    assert found == ([{"processors": lost}] if lost else [])
