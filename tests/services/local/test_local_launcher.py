"""What the launcher tells the workers of a machine, none of which starts here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.engine.runner.processors import Core
from quire.services.local import local_launcher
from quire.services.local.child_processes import FROM_SCRATCH, ChildProcesses
from quire.services.local.local_launcher import LocalLauncher
from quire.services.worker.config import WorkerConfig
from tests.testing.machines import DESKTOP, TWO_SOCKETS


@pytest.mark.parametrize(("cores", "expected"), [(DESKTOP, 1), (TWO_SOCKETS, 2)])
def test_workers_know_how_many_copies_of_the_weights_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: list[Core], expected: int
) -> None:
    started: dict[str, WorkerConfig] = {}

    def start(self: object, arguments: Mapping[str, WorkerConfig]) -> None:
        started.update(arguments)

    monkeypatch.setattr(local_launcher, "read_cores", lambda processors: cores)
    monkeypatch.setattr(ChildProcesses, "start", start)
    launcher = LocalLauncher({}, FROM_SCRATCH, str(tmp_path))
    launcher.start({name: WorkerConfig(role="decode", worker_id=name) for name in ("a", "b", "c", "d")})
    assert {config.num_weights_files for config in started.values()} == {expected}
    assert len(launcher.weights_files) == expected
    for file in launcher.weights_files.values():
        file.close()


def test_a_new_worker_gets_the_processors_of_one_that_is_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: LocalLauncher, arguments: Mapping[str, WorkerConfig]) -> None:
        self._arguments.update(arguments)

    def configs(*names: str) -> dict[str, WorkerConfig]:
        return {name: WorkerConfig(role="decode", worker_id=name) for name in names}

    monkeypatch.setattr(local_launcher, "read_cores", lambda processors: TWO_SOCKETS)
    monkeypatch.setattr(ChildProcesses, "start", start)
    launcher = LocalLauncher({}, FROM_SCRATCH, str(tmp_path))
    launcher.start(configs("a", "b", "c", "d"))
    places = dict(launcher.places)
    launcher._stopping.add("b")
    launcher.start(configs("e"))
    assert launcher.places.pop("e").own == places["b"].own
    assert launcher.places == {name: places[name] for name in ("a", "c", "d")}
    for file in launcher.weights_files.values():
        file.close()
