"""A worker that cannot lend its processors serves without."""

from __future__ import annotations

import errno
import fcntl
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.runner.lent_processors import SharedProcessors
from quire.services.worker.lifecycle.engine import _lent_processors


def start_with(path: Path) -> Any:
    config = SimpleNamespace(shared_processors=SharedProcessors(path, 0, (1, 1)))
    return SimpleNamespace(config=config, stack=AsyncExitStack())


def test_a_worker_whose_file_of_locks_was_removed_lends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _lent_processors(start_with(tmp_path / "removed")) is None
    assert "processors_not_lent" in caplog.text


def test_a_worker_lends_nothing_on_a_system_without_such_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    path = tmp_path / "locks"
    path.touch()
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert _lent_processors(start_with(path)) is None
    assert "processors_not_lent" in caplog.text
