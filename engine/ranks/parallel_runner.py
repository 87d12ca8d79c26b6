"""Runs steps on all ranks of a worker, behind the interface of a model runner."""

from __future__ import annotations

import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.step_tensors import StepTensors
from quire.engine.ranks.messages import write_step
from quire.engine.ranks.ranks import Ranks
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.weights.loader import LoadedModel


class ParallelRunner(ModelRunner):
    """Rank 0: it sends each step to the other ranks and runs it with them.

    All ranks share the blocks. Each rank writes and reads only the keys and values of its own heads. The
    other ranks do not touch blocks between steps, so rank 0 can move whole blocks like a process without
    ranks.

    Args:
        model: rank 0's part of the model.
        memory: the KV blocks, which all ranks have mapped.
        swap_memory: host blocks of preempted groups; None means that there are none.
        ranks: the other ranks.
    """

    def __init__(
        self, model: LoadedModel, memory: KvMemory, swap_memory: KvMemory | None, ranks: Ranks
    ) -> None:
        super().__init__(model, memory, swap_memory)
        self._ranks = ranks

    def forward(self, step: StepTensors) -> torch.Tensor:
        """Run a step on all ranks; return the whole logits, valid until the next step.

        Raises:
            RanksError: a rank has failed.
        """
        self._ranks.send(write_step(self._ranks.collectives.memory, step))
        logits = super().forward(step)
        self._ranks.expect_steps()
        return logits
