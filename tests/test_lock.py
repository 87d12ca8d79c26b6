"""The lock in ``requirements/`` agrees with pyproject.toml; ``scripts/lock`` writes it."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.testing.commands import run_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def load() -> ModuleType:
    """Import ``requirements/locked.py``, which is a script."""
    spec = importlib.util.spec_from_file_location("locked", ROOT / "requirements" / "locked.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


locked = load()
LOCK = locked.read_lock(locked.LOCK)
TORCH = locked.read_lock(locked.TORCH)
PINS = {
    name: [Requirement(pin) for pin in re.findall(r"^\w[^\\\n]*", package.lines, re.MULTILINE)]
    for name, package in (LOCK | TORCH).items()
}
DIRECT = [
    *PROJECT["build-system"]["requires"],
    *PROJECT["project"]["dependencies"],
    *locked.direct_requirements(PROJECT, "dev"),
]


@pytest.mark.parametrize("text", sorted(set(DIRECT)))
def test_a_direct_requirement_is_pinned_inside_its_range(text: str) -> None:
    requirement = Requirement(text)
    name = canonicalize_name(requirement.name)
    assert name in PINS, f"{name} is not in the lock: run scripts/lock"
    for pin in PINS[name]:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert requirement.specifier.contains(specifier.version), "the lock is out of date: run scripts/lock"


def test_nothing_in_the_lock_is_unneeded() -> None:
    assert set(LOCK) == set(locked.select(["dev", "build"]))
    direct = {canonicalize_name(Requirement(text).name) for text in DIRECT}
    told = {name for name, package in (LOCK | TORCH).items() if "quire-llm" in package.parents}
    assert told == direct


def test_every_package_of_the_lock_has_a_hash() -> None:
    without = [name for name, package in LOCK.items() if "--hash=sha256:" not in package.lines]
    assert without == []


def test_packages_of_torch_have_no_hash_and_no_other_parent() -> None:
    assert "--hash" not in locked.TORCH.read_text()
    for name, package in TORCH.items():
        # NIXL requires torch, which every worker has.
        assert package.parents <= TORCH.keys() | {"quire-llm", "nixl-cu12"}, name
    assert TORCH["torch"].parents == {"quire-llm", "nixl-cu12"}


@pytest.mark.parametrize("path", [locked.LOCK, locked.TORCH], ids=lambda path: str(path.name))
def test_the_lock_names_no_index(path: Path) -> None:
    assert not re.search(r"://|--(extra-)?index|--find-links", path.read_text())


def test_run_installs_the_readmes_extras_and_nothing_for_tests() -> None:
    command = "source scripts/setup.sh && echo $RUN_EXTRAS"
    extras = run_command("bash", "-c", command, cwd=ROOT).stdout
    chosen = locked.select(extras.strip().split(","))
    assert {"aiohttp", "llguidance", "numba", "transformers"} <= chosen.keys()
    assert not {"pytest", "triton", "torch", "matplotlib"} & chosen.keys()


def test_an_extra_includes_indirect_packages() -> None:
    assert {"numba", "llvmlite", "sympy", "mpmath"} <= locked.select(["worker"]).keys()
    assert "numba" not in locked.select(["http"])
    assert {"setuptools", "grpcio-tools", "protobuf"} <= locked.select(["build"]).keys()
    assert "redis" not in locked.select(["build"])


def test_a_package_can_have_a_version_for_each_python(tmp_path: Path) -> None:
    path = tmp_path / "lock.txt"
    path.write_text(
        "# Written by a program.\n"
        "num==1 ; python_version < '3.12' \\\n    --hash=sha256:a\n    # via one\n"
        "num==2 ; python_version >= '3.12' \\\n    --hash=sha256:b\n    # via\n    #   one\n    #   Two_b\n"
    )
    (package,) = locked.read_lock(path).values()
    assert package.parents == {"one", "two-b"}
    assert package.lines == path.read_text().split("\n", 1)[1]
