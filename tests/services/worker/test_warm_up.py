"""The prompt that an engine computes before it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.weights.loader import load_model
from quire.services.worker.lifecycle.engine import _warm_up
from tests.testing.tiny_engine import CPU


@pytest.mark.parametrize("max_model_len", [2, 3, 4])
def test_the_shortest_sequences_are_warmed_up_too(
    max_model_len: int, tiny_model: Callable[..., Path]
) -> None:
    model = load_model(str(tiny_model("llama")), "float32", CPU)
    memory = KvMemory(model.kv_shape(16), 2, CPU)
    engine = Engine(model, memory, SchedulerConfig(16, 4, 32), max_model_len)
    _warm_up(engine)
    assert engine.is_idle
    assert engine.pool.counts.free == 2
