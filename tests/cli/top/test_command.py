"""``quire top`` as a command: what it prints once, and its errors."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from typer.testing import Result

from quire.cli.top import command

Quire = Callable[..., Result]


def test_without_a_router_it_names_the_option(quire: Quire) -> None:
    result = quire("top", "--once", "--admin-address", "127.0.0.1:1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no router's admin port answers at 127.0.0.1:1: name it with --admin-address" in result.stderr


def test_another_port_is_named(quire: Quire, fake_generation: object) -> None:
    result = quire("top", "--once", "--admin-address", fake_generation.address)  # type: ignore[attr-defined]
    assert result.exit_code == 1
    assert "is another port than a router's admin port" in result.stderr


def test_over_a_pipe_the_live_screen_names_once(quire: Quire) -> None:
    result = quire("top")
    assert (result.exit_code, result.stderr) == (
        1,
        "error: the live screen needs a terminal: quire top --once prints the numbers once\n",
    )


def test_without_textual_it_names_the_command_that_installs_it(
    quire: Quire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    monkeypatch.delitem(sys.modules, "quire.cli.top.app", raising=False)
    monkeypatch.setitem(sys.modules, "textual.app", None)
    result = quire("top", "--admin-address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert ".venv/bin/pip install -e '.[top]'" in result.stderr
    assert "quire top --once" in result.stderr
