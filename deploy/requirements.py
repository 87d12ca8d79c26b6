"""Print what a project and some of its extras depend on: ``requirements.py pyproject.toml EXTRA ...``."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Return the requirements of the project itself and of its extras."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    return [*project["dependencies"], *(each for extra in extras for each in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), sys.argv[2:])))
