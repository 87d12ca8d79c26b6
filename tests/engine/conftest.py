"""Tiny random models, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.random_model import make_random_model

# Threads that spin beside the workers' would slow both down many times over.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from architecture name to the folder of its tiny random model."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = make_random_model(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return get


class ConstantRunner:
    """Computes nothing: token 5 is always the most probable."""

    def move_blocks(self, schedule: Any) -> None:
        pass

    def prepare(self, scheduled: list[Any]) -> list[Any]:
        return scheduled

    def forward(self, scheduled: list[Any]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.full((len(scheduled),), 5), 8).float()


@pytest.fixture
def constant_runner() -> ConstantRunner:
    return ConstantRunner()
