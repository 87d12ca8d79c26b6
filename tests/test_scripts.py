"""``./test`` with other programs in place of its stages, and what is in ``scripts``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.testing.commands import run_command
from tests.testing.repository import ROOT, package_folders

PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >>ran.txt
case "$(basename "$0") $*" in {failing}) exit 1 ;; esac
"""


def prepare(folder: Path, failing: str) -> None:
    """Make a copy of ``./test`` whose stages note that they ran, and fail if they match a pattern."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "setup.sh").write_text('set_up() { :; }\nsay() { echo "$*" >&2; }\n')
    shutil.copy(ROOT / "test", folder)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    stages = [programs / name for name in ("ruff", "mypy", "pytest", "python", "slipcover")]
    for path in (*stages, folder / "scripts" / "coverage"):
        path.write_text(PROGRAM.format(failing=failing))
        path.chmod(0o755)


def run_stages(folder: Path, failing: str, *arguments: str) -> tuple[int, list[str], list[str]]:
    """Run a copy of ``./test`` in which some calls fail, and return (status, calls, lines on stderr)."""
    prepare(folder, failing)
    ended = subprocess.run(
        [folder / "test", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    return ended.returncode, (folder / "ran.txt").read_text().splitlines(), ended.stderr.splitlines()


UNMEASURED = [f"tests/{each}" for each in ("e2e", "soak", "benchmarks", "deploy")]
IGNORED = " ".join(f"--ignore={each}" for each in ("tests/engine", "tests/kernels", *UNMEASURED))
SIDE_BY_SIDE = [
    "slipcover --out build/coverage-engine.json -m pytest tests/engine",
    f"python -P -m pytest {' '.join(UNMEASURED)}",
]
IN_TURN = [
    "ruff check",
    "ruff format --check",
    "mypy ",
    f"slipcover --out build/coverage-rest.json -m pytest tests {IGNORED}",
    "python -P -m pytest tests/kernels",
    "coverage ",
]
ALL_STAGES = SIDE_BY_SIDE + IN_TURN


@pytest.mark.parametrize(
    "failing", ["slipcover*-rest*", "slipcover*-engine*", "ruff*", "mypy*", "python*e2e*"]
)
def test_a_stage_that_fails_hides_no_other(tmp_path: Path, failing: str) -> None:
    status, ran, said = run_stages(tmp_path, failing)
    assert status == 1
    assert sorted(ran) == sorted(ALL_STAGES)
    summary = said[said.index("summary") + 1 :]
    assert len(summary) == len(ALL_STAGES)
    assert sum("failed" in line for line in summary) == (2 if failing == "ruff*" else 1)


def test_all_stages_passed(tmp_path: Path) -> None:
    status, ran, said = run_stages(tmp_path, "none")
    assert status == 0
    assert sorted(ran) == sorted(ALL_STAGES)
    assert [each for each in ran if each not in SIDE_BY_SIDE] == IN_TURN
    assert [line.split()[-3] for line in said[-8:]] == ["passed"] * 8


def test_fast_checks_types_and_leaves_out_the_slow_tests(tmp_path: Path) -> None:
    status, ran, said = run_stages(tmp_path, "mypy*", "fast")
    assert status == 1
    tests = [each for each in ran if each.startswith("python")]
    assert ["-m not slow" in each for each in tests] == [True] * 3
    assert [each for each in ran if each not in tests] == ["ruff check", "ruff format --check", "mypy "]
    assert [line.split()[-3] for line in said[-6:]] == ["passed"] * 2 + ["failed"] + ["passed"] * 3


@pytest.mark.slow
def test_each_stage_shows_its_own_duration(tmp_path: Path) -> None:
    """The end-to-end tests end here before their stage waits for them."""
    prepare(tmp_path, "none")
    programs = tmp_path / ".venv" / "bin"
    (programs / "python").write_text("#!/bin/sh\nsleep 2\ntouch ended\n")
    (programs / "slipcover").write_text("#!/bin/sh\nuntil [ -e ended ]; do sleep 0.1; done\n")
    ended = run_command(tmp_path / "test")
    (line,) = [
        line for line in ended.stderr.splitlines() if line.startswith("end-to-end tests and tools   passed")
    ]
    assert line.split()[-2] != "0"


def test_ctrl_c_ends_the_tests_that_run_side_by_side(tmp_path: Path) -> None:
    endless = """#!/usr/bin/env python3
import pathlib, sys, time
name = pathlib.Path(sys.argv[0]).name
try:
    pathlib.Path(f"{name}.began").touch()
    while True:
        time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path(f"{name}.ended").touch()
    sys.exit(2)
"""
    prepare(tmp_path, "none")
    for name in ("python", "slipcover"):
        (tmp_path / ".venv" / "bin" / name).write_text(endless)
    # A terminal sends the signal to the whole group of processes.
    process = subprocess.Popen(
        [tmp_path / "test"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 30
    while not all((tmp_path / f"{name}.began").exists() for name in ("python", "slipcover")):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    assert all((tmp_path / f"{name}.ended").exists() for name in ("python", "slipcover"))


def test_the_folders_are_those_of_the_package() -> None:
    command = "source scripts/setup.sh && echo $FOLDERS"
    assert run_command("bash", "-c", command, cwd=ROOT).stdout.split() == package_folders()


def test_the_coverage_of_a_file_and_of_its_link_are_one(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "coverage", tmp_path / "scripts")
    build, source = tmp_path / "build", tmp_path / "engine" / "pool.py"
    build.mkdir()
    source.parent.mkdir()
    source.touch()
    (build / "pool.py").symlink_to(source)
    files = {
        "engine/pool.py": {"executed_lines": [], "missing_lines": [1, 2, 4, 5, 6, 9]},
        "build/pool.py": {"executed_lines": [1, 5], "missing_lines": [2, 4, 6, 9]},
        "engine/none.py": {"executed_lines": [1], "missing_lines": []},
    }
    for number, (name, lines) in enumerate(files.items()):
        (build / f"coverage-{number}.json").write_text(json.dumps({"files": {name: lines}}))
    printed = run_command(sys.executable, tmp_path / "scripts" / "coverage").stdout.splitlines()
    assert printed[1:3] == ["     6      4  33.3%  engine/pool.py  2-4, 6-9", "     7      4  42.9%  total"]
    assert (build / "coverage.txt").read_text().splitlines() == printed[:3]
