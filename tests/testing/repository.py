"""The repository that the tests are in."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]


def package_folders() -> list[str]:
    """Return the folders of the package, which setup.py lists."""
    for node in ast.parse((ROOT / "setup.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no FOLDERS")
