"""Workers that share weights check the model once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from quire.engine.model.check import UnsupportedModelError, check_paging
from quire.engine.weights.loader import load_model
from quire.engine.weights.weights_file import WeightsFile
from tests.testing.tiny_engine import CPU


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each check."""
    calls: list[str] = []

    def counted(*arguments: Any) -> None:
        calls.append("check")
        check_paging(*arguments)

    monkeypatch.setattr("quire.engine.weights.loader.check_paging", counted)
    return calls


@pytest.mark.parametrize(
    ("architecture", "has_recipe"), [("llama", True), ("mixtral", True), ("gpt_neox", False)]
)
def test_only_the_first_worker_computes_with_the_model(
    tiny_model: Callable[[str], Path],
    file: WeightsFile,
    num_checks: list[str],
    architecture: str,
    has_recipe: bool,
) -> None:
    first, second = (
        load_model(str(tiny_model(architecture)), "float32", CPU, weights_file=file) for _ in range(2)
    )
    assert len(num_checks) == 1
    assert [each.recipe is not None for each in (first, second)] == [has_recipe] * 2
    assert (first.heads.calls, first.arithmetic) == (second.heads.calls, second.arithmetic)


def test_a_model_that_failed_is_checked_again(
    tiny_model: Callable[[str], Path], file: WeightsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Mock(side_effect=UnsupportedModelError("refused"))
    monkeypatch.setattr("quire.engine.weights.loader.check_paging", refusing)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="llama: refused"):
            load_model(str(tiny_model("llama")), "float32", CPU, weights_file=file)
    assert file.read_notes() == b""


def test_a_worker_with_weights_of_its_own_checks_them(
    tiny_model: Callable[[str], Path], file: WeightsFile, num_checks: list[str]
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        load_model(str(tiny_model("llama")), str(dtype).removeprefix("torch."), CPU, weights_file=file)
    assert len(num_checks) == 2
