"""An engine without a model that always samples the same token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.benchmarks.harness.engines import model_without_layers
from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.weights.loader import LoadedModel
from quire.kvindex.kv_layout import KvShape

TOKEN, VOCAB_SIZE = 5, 8
CPU = torch.device("cpu")


class ConstantRunner(ModelRunner):
    """Computes nothing: token 5 is always the most probable.

    Attributes:
        before_forward: is called before each forward pass; it may raise an error or wait.
    """

    def __init__(self, model: LoadedModel, memory: KvMemory, swap_memory: KvMemory | None = None) -> None:
        super().__init__(model, memory, swap_memory)
        self.before_forward: Callable[[], object] = lambda: None

    def forward(self, step: StepTensors) -> torch.Tensor:
        self.before_forward()
        return torch.nn.functional.one_hot(torch.full_like(step.logit_rows, TOKEN), VOCAB_SIZE).float()


def make_constant_engine(
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    num_blocks: int = 8,
    num_swap_blocks: int = 0,
    block_size: int = 4,
    max_model_len: int = 64,
    **parts: Any,
) -> Engine:
    """Return an engine with the given optional parts; groups are preempted to host memory if it has any."""
    model = model_without_layers(max_model_len)
    shape = KvShape(1, 1, block_size, 1, "float32")
    memory = KvMemory(shape, num_blocks, CPU)
    swap_memory = KvMemory(shape, num_swap_blocks, CPU) if num_swap_blocks else None
    limits = SchedulerConfig(block_size, max_num_seqs, max_num_batched_tokens)
    runner = ConstantRunner(model, memory, swap_memory)
    engine = Engine(model, memory, limits, parts=EngineParts(swap_memory=swap_memory, runner=runner, **parts))
    engine.preemption.prefers_swap = lambda num_tokens, num_blocks: True
    return engine
