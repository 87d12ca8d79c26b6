"""The names that users import: complete, documented, and listed in docs/python.md."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["quire.client", "quire.llm"]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_names_what_the_package_imports(name: str) -> None:
    package = importlib.import_module(name)
    imported = {
        each
        for each, value in vars(package).items()
        if not each.startswith("_") and not isinstance(value, ModuleType) and each != "annotations"
    }
    assert imported == set(package.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_public_classes_have_docstrings(name: str) -> None:
    package = importlib.import_module(name)
    classes = [value for each in package.__all__ if inspect.isclass(value := getattr(package, each))]
    assert len(classes) > 5
    assert [each for each in classes if not each.__doc__] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_page_of_python_has_every_public_name(name: str) -> None:
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    assert [each for each in importlib.import_module(name).__all__ if f"`{each}`" not in page] == []
