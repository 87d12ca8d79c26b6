"""The hosted workflows: whose code they run, and on which Pythons."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: str(path.name))
def test_every_action_is_pinned_by_the_hash_of_a_commit(workflow: Path) -> None:
    used = re.findall(r"uses: (.*)", workflow.read_text("utf-8"))
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[0-9.]+", each)] == []


def test_the_tests_run_on_each_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    (matrix,) = re.findall(r"python: \[(.*)\]", (ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    assert re.findall(r"[\d.]+", matrix) == named
    assert project["requires-python"] == f">={named[0]}"
