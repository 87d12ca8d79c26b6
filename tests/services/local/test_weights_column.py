"""The progress of loading is that of the file which workers write."""

from __future__ import annotations

import os

import pytest
from rich.progress import Progress

from quire.engine.weights.weights_file import create_weights_file
from quire.services.local.weights_column import WeightsColumn


def test_it_shows_bytes_and_rate_while_workers_write(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("quire.services.local.weights_column.time.monotonic", lambda: now)
    progress = Progress()
    progress.add_task("starting")
    task = progress.tasks[0]
    file = create_weights_file()
    column = WeightsColumn([file])
    try:
        assert column.render(task).plain == ""
        os.write(file.descriptor, bytes(4_096_000))
        column.render(task)
        now = 2.0
        assert column.render(task).plain == "4.1 MB of weights, 2.0 MB/s"
        file.seal()
        assert column.render(task).plain == ""
    finally:
        file.close()
