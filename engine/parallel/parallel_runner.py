"""Runs steps on all ranks of a worker; the engine sees a model runner like any other."""

from __future__ import annotations

import torch

from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.model_runner import ModelRunner
from quire.engine.parallel.messages import Header, Kind, write_moves, write_step
from quire.engine.parallel.ranks import Ranks
from quire.engine.schedule import Schedule
from quire.engine.step_tensors import StepTensors


class ParallelRunner(ModelRunner):
    """Rank 0: it sends each step to the other ranks and runs it with them.

    The block ids are the same on all ranks. Each rank has the keys and values of its own heads.

    Args:
        model: rank 0's part of the model.
        memory: its KV blocks; the other ranks get as many.
        swap_memory: host blocks of preempted groups; None means that there are none.
        ranks: the other ranks.

    Raises:
        RanksError: a rank has failed.
    """

    def __init__(
        self, model: LoadedModel, memory: KvMemory, swap_memory: KvMemory | None, ranks: Ranks
    ) -> None:
        super().__init__(model, memory, swap_memory)
        self._ranks = ranks
        num_swap_blocks = 0 if swap_memory is None else swap_memory.num_blocks
        ranks.send(Header(Kind.MAKE_MEMORY, memory.num_blocks, num_swap_blocks))
        ranks.collectives.meet()
        ranks.expect_steps()

    def move_blocks(self, schedule: Schedule) -> None:
        """Move blocks on all ranks.

        Raises:
            RanksError: a rank has failed.
        """
        collectives = self._ranks.collectives
        self._ranks.send(write_moves(collectives.memory, schedule))
        super().move_blocks(schedule)
        collectives.meet()

    def forward(self, step: StepTensors) -> torch.Tensor:
        """Run a step on all ranks and return all logits, valid until the next step.

        Raises:
            RanksError: a rank has failed.
        """
        self._ranks.send(write_step(self._ranks.collectives.memory, step))
        return super().forward(step)
