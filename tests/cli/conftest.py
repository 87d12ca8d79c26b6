"""Runs the command as a user does, in this process or in one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from quire.cli.app import make_app
from tests.testing.fake_generation import fake_generation as fake_generation

COMMAND = [sys.executable, "-c", "from quire.cli.main import main; main()"]


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
