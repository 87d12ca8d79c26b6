"""Dockerfile and .dockerignore: what gets into the images, and what does not."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def stage(name: str) -> str:
    """Return the instructions of a stage."""
    (found,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(found)


def argument(name: str) -> str:
    """Return the default of a build argument."""
    (value,) = re.findall(rf'^ARG {name}="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE)
    return str(value)


def requirements(*extras: str) -> set[str]:
    """Return the pins that ``requirements/locked.py`` prints."""
    command: list[str | Path] = [sys.executable, ROOT / "requirements" / "locked.py", *extras]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return set(re.findall(r"^\S+==\S+", printed, re.MULTILINE))


@pytest.mark.parametrize("name", ["router", "worker"])
def test_an_image_runs_as_nobody_special(name: str) -> None:
    users = re.findall(r"^USER (\S+)$", stage(name), re.MULTILINE)
    assert users[-1:] == ["10001:10001"]


def test_every_image_comes_from_one_base_that_can_be_chosen() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    stages = {name for _, name in bases}
    assert {base for base, _ in bases} - stages == {"${PYTHON_IMAGE}"}
    assert "# syntax=" not in DOCKERFILE, "it would be fetched from a registry"


def test_the_router_has_no_torch() -> None:
    router = requirements(*argument("ROUTER_EXTRAS").split())
    worker = requirements(*argument("ROUTER_EXTRAS").split(), *argument("WORKER_EXTRAS").split())
    assert not [pin for pin in router if re.match("torch|transformers|numba|triton|nvidia", pin)]
    assert router < worker
    assert "FROM router-requirements AS router" in DOCKERFILE


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yaml", "compose.gpu.yaml"])
def test_the_torch_that_is_installed_is_the_locked_one(file: str) -> None:
    (locked,) = re.findall(r"^torch==(\S+)", (ROOT / "requirements/torch.txt").read_text(), re.MULTILINE)
    named = re.findall(r"torch==([0-9.]+)", (ROOT / file).read_text(encoding="utf-8"))
    assert set(named) == {locked}


def test_the_default_torch_is_the_one_for_the_cpu() -> None:
    assert argument("TORCH").endswith("+cpu")


def test_nothing_of_the_package_is_ignored() -> None:
    """A folder that .dockerignore hides would be missing from the wheel without a word."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (folders,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS"
    )
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    needed = [
        *folders,
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "requirements",
        "requirements/locked.py",
    ]
    assert [name for name in needed if any(fnmatch(name, pattern) for pattern in patterns)] == []
