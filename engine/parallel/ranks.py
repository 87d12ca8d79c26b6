"""The ranks of a worker other than 0, as rank 0 sees them, on this machine or on others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future

import torch

from quire.engine.block_memory import BlockMemory
from quire.engine.config import EngineConfig
from quire.engine.model_loader import LoadedModel
from quire.engine.parallel.collectives import Collectives
from quire.engine.step_tensors import StepTensors
from quire.kvindex.kv_layout import KvShape
from quire.settings.setting import SettingError

LOAD_SECONDS = 600.0
"""How long rank 0 waits for another rank until their first step: one may compile kernels, or read slowly."""
STEP_SECONDS = 10.0
"""How long rank 0 waits for another rank in a step; their shares of the work are equal."""


class Ranks(ABC):
    """Rank 0's side of a group of ranks. If any rank ends, stops or hangs, the whole group fails.

    Attributes:
        collectives: those of rank 0, whose errors say why the group has failed.
        failure: gets the reason when the group fails.
    """

    collectives: Collectives
    failure: Future[str]

    @abstractmethod
    def allocate_pool(self, model: LoadedModel, shape: KvShape, num_blocks: int) -> BlockMemory:
        """Return the block pool, of which each rank can reach at least its own heads.

        Call this once, when rank 0 has loaded its part of the model.

        Args:
            model: rank 0's part of the model.
            shape: the shape of a whole block.
            num_blocks: number of blocks.

        Raises:
            RanksError: a rank has failed.
        """

    @abstractmethod
    def send_step(self, step: StepTensors) -> None:
        """Let all other ranks run a step.

        Raises:
            RanksError: a rank has failed.
        """

    @abstractmethod
    def expect_steps(self) -> None:
        """From now on, let the group fail if a rank is late in a step; call this after the first step."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks; calling this again does nothing."""


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Raise SettingError if a model cannot be divided among processes on a device."""
    if device.type != "cpu":
        size = config.name_of("tensor_parallel_size")
        raise SettingError(
            f"{size} {config.tensor_parallel_size} runs on CPUs only, and the device is {device.type!r}: "
            f"leave {size} at 1, or hide the GPUs with CUDA_VISIBLE_DEVICES="
        )
