"""Tiny random models, made once, and an engine without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel, load_model
from quire.engine.scheduler import SchedulerConfig
from quire.kvindex.kv_layout import KvShape
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


@pytest.fixture(scope="session")
def load(tiny_model: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """Return a function that loads an architecture's tiny model, once, in float32 on the CPU."""
    loaded: dict[str, LoadedModel] = {}

    def get(architecture: str) -> LoadedModel:
        if architecture not in loaded:
            loaded[architecture] = load_model(str(tiny_model(architecture)), "float32", torch.device("cpu"))
        return loaded[architecture]

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
def make_constant_engine() -> Callable[..., Engine]:
    """Return a function from limits to an engine of eight blocks of four tokens that always samples 5."""

    def make(max_num_seqs: int, max_num_batched_tokens: int, **options: Any) -> Engine:
        model: Any = SimpleNamespace(max_position_embeddings=64, eos_token_ids=frozenset({1}), window=None)
        memory = KvMemory(KvShape(1, 1, 4, 1, "float32"), 8, torch.device("cpu"))
        limits = SchedulerConfig(4, max_num_seqs, max_num_batched_tokens)
        parts = EngineParts(**options)
        engine = Engine(model, memory, limits, lambda parent, tokens: parent + bytes(tokens), parts=parts)
        engine.runner = ConstantRunner()  # type: ignore[assignment]
        return engine

    return make
