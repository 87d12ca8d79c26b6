"""Help of every verb, and what it costs to show it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import Result

from quire.cli import app
from quire.cli.failure import INTERRUPTED
from quire.cli.main import main
from tests.testing.commands import run_command

Quire = Callable[..., Result]

VERBS = ["serve", "router", "prefill", "decode", "doctor", "keys", "admin", "top"]
VERBS += ["generate", "chat", "health", "bench", "simulate"]


# What the services run with; the modules of their settings load none of it.
SERVICES = ["quire.rpc.server", "quire.services.router.app", "quire.services.worker.main"]
SERVICES += ["quire.services.worker_process", "quire.services.local.stack", "prometheus_client"]


def test_help_lists_every_verb_in_its_panel(quire: Quire) -> None:
    result = quire("--help")
    assert result.exit_code == 0
    for text in (*VERBS, "Serve", "Use", "Measure", "QUIRE_"):
        assert text in result.output


@pytest.mark.parametrize(
    "verb",
    [
        *VERBS,
        "bench serve",
        "doctor serve",
        "doctor decode",
        "keys new",
        "admin workers",
        "admin drain",
        "admin clear-cache",
        "admin log-level",
    ],
)
def test_every_verb_has_help(quire: Quire, verb: str) -> None:
    result = quire(*verb.split(), "--help")
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


def test_settings_show_their_variable(quire: Quire) -> None:
    assert "QUIRE_MAX_NUM_SEQS" in quire("serve", "--help").output


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], ["torch", "transformers", "numba", "grpc", "asyncio", "quire.client", *SERVICES]),
        (["generate", "--address", "127.0.0.1:1", "x"], ["torch", "transformers", "numba", *SERVICES]),
        (["health", "127.0.0.1:1"], ["torch", "transformers", "numba", "quire.client", *SERVICES]),
        (["bench", "serve", "--address", "127.0.0.1:1"], ["torch", "transformers", "numba", *SERVICES]),
    ],
)
def test_verbs_import_only_what_they_need(arguments: list[str], absent: list[str]) -> None:
    program = (
        "import sys\n"
        "from quire.cli.main import main\n"
        "try: main()\n"
        f"except SystemExit: print(sorted(set({absent!r}) & set(sys.modules)))"
    )
    done = run_command(sys.executable, "-c", program, *arguments)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_arguments_show_help(quire: Quire) -> None:
    assert "Usage:" in quire().output


def test_an_unknown_option_is_a_usage_error(quire: Quire) -> None:
    assert quire("serve", "--beam-width", "3").exit_code == 2


def test_the_version_is_that_of_the_distribution(quire: Quire) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    assert quire("--version").output == f"quire {project['version']}\n"


@pytest.mark.parametrize(
    ("verb", "columns"), [("serve", None), *((verb, "60") for verb in (*VERBS[:4], "generate", "simulate"))]
)
def test_help_is_not_cut_where_there_is_little_room(
    verb: str, columns: str | None, command: list[str]
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    if columns is not None:
        environment["COLUMNS"] = columns
    run = subprocess.run(
        [*command, verb, "--help"], capture_output=True, text=True, timeout=30, check=True, env=environment
    )
    assert "…" not in run.stdout


def test_ctrl_c_before_a_command_runs_ends_it_without_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "make_app", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == INTERRUPTED
