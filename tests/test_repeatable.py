"""Property tests draw the same examples in each run, whatever other modules are imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn() -> list[int]:
    """Return the examples of a property of integers."""
    numbers: list[int] = []

    @given(st.integers())
    def record(number: int) -> None:
        numbers.append(number)

    record()
    return numbers


def test_examples_do_not_depend_on_other_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = drawn()
    assert len(set(before)) > 20
    constants = range(1_000_003, 1_000_303)
    (tmp_path / "another_module.py").write_text(f"numbers = {list(constants)}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("another_module")
    assert drawn() == before


def test_a_search_draws_other_examples_each_time() -> None:
    suite = settings.get_current_profile_name()
    settings.load_profile("search")
    try:
        assert drawn() != drawn()
    finally:
        settings.load_profile(suite)
