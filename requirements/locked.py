"""Print the part of the lock that some extras need: ``python requirements/locked.py EXTRA ...``.

Each entry pins a version and lists the hashes of its files, as ``pip install --require-hashes`` wants it. The
extra ``build`` stands for what builds the project, and ``dev`` for all extras and the group ``dev``. Torch is
not printed: each of its builds has a hash of its own, and ``torch.txt`` pins its version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
PROJECT = HERE.parent / "pyproject.toml"
LOCK = HERE / "lock.txt"
TORCH = HERE / "torch.txt"


class Locked(NamedTuple):
    """A package of the lock: its lines in the file, and the packages that require it."""

    lines: str
    parents: frozenset[str]


def normalize(name: str) -> str:
    """Return a distribution's name in the one form in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Return the normalized name in a requirement such as ``redis[hiredis]>=5.2``."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    if found is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return normalize(found[0])


def read_lock(path: Path) -> dict[str, Locked]:
    """Return the packages of a lock by name, with the parents that its ``# via`` comments tell."""
    packages: dict[str, Locked] = {}
    for lines in re.findall(r"^\w.*\n(?:[ ].*\n)*", path.read_text(encoding="utf-8"), re.MULTILINE):
        parents = {normalize(each) for each in re.findall(r"^ +# +(?:via +)?(\S+)", lines, re.MULTILINE)}
        # A package has several entries if Pythons need different versions of it.
        earlier = packages.get(name_of(lines), Locked("", frozenset()))
        packages[name_of(lines)] = Locked(earlier.lines + lines, earlier.parents | parents - {"via"})
    return packages


def direct_requirements(project: dict[str, Any], extra: str) -> list[str]:
    """Return what pyproject.toml requires for an extra."""
    if extra == "build":
        return list(project["build-system"]["requires"])
    extras = project["project"]["optional-dependencies"]
    if extra == "dev":
        return [*project["dependency-groups"]["dev"], *chain.from_iterable(extras.values())]
    return list(extras[extra])


def select(extras: Iterable[str]) -> dict[str, Locked]:
    """Return the packages of lock.txt that the extras need, directly or not.

    What only builds the project does not need the project's own dependencies.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    extras = list(extras)
    needed = {name_of(each) for extra in extras for each in direct_requirements(project, extra)}
    if extras != ["build"]:
        needed |= {name_of(each) for each in project["project"]["dependencies"]}
    lock = read_lock(LOCK)
    packages = lock | read_lock(TORCH)
    size = 0
    while size < len(needed):
        size = len(needed)
        needed |= {
            name
            for name, package in packages.items()
            # Torch requires Triton in its builds for CUDA only, and those bring it.
            if (package.parents - {"torch"} if name == "triton" else package.parents) & needed
        }
    return {name: package for name, package in lock.items() if name in needed}


if __name__ == "__main__":
    print("".join(package.lines for package in select(sys.argv[1:]).values()), end="")
