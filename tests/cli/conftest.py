"""Runs the command as a user does, in this process or in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

from quire.cli.app import make_app

COMMAND = [sys.executable, "-c", "from quire.cli.main import main; main()"]


def _load(path: Path) -> ModuleType:
    spec = spec_from_file_location("client_fixtures", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The tests of the client have the same server; folders of tests are no packages that could import each other.
fake_generation = _load(Path(__file__).parents[1] / "client" / "conftest.py").fake_generation


@pytest.fixture
def command() -> list[str]:
    """Return the command line that runs ``quire`` in a process of its own."""
    return COMMAND


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return a function that runs ``quire`` in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(make_app(), list(arguments), input=stdin)

    return run
