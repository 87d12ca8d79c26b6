"""Makes the engine of an ``LLM``."""

from __future__ import annotations

import torch

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import load_model
from quire.engine.parallel.parallel_runner import ParallelRunner
from quire.engine.parallel.ranks import Ranks
from quire.engine.pool_memory import allocate_swap_space, pool_size
from quire.engine.scheduler import SchedulerConfig
from quire.engine.speculators import load_draft_model, make_speculator
from quire.kvindex.block_hash import block_hash
from quire.llm.config import LLMConfig


def make_engine(config: LLMConfig, device: torch.device, ranks: Ranks | None) -> Engine:
    """Load the models, allocate the blocks, and return the engine.

    Args:
        ranks: the other processes that the model is divided among; None if there are none.

    Raises:
        OSError: there is no such model.
        ValueError: the model or the machine does not allow the settings.
        RanksError: a rank has failed.
    """
    collectives = None if ranks is None else ranks.collectives
    loaded = load_model(config.model_path, config.dtype, device, config.weight_dtype, collectives)
    draft = load_draft_model(config, loaded, device)
    shape, num_blocks = pool_size(config, loaded, draft, device)
    memory = (
        KvMemory(shape, num_blocks, device)
        if ranks is None
        else ranks.allocate_pool(loaded, shape, num_blocks)
    )
    limits = SchedulerConfig.of(config)
    swap_memory = allocate_swap_space(config, memory)
    parts = EngineParts(
        swap_memory=swap_memory,
        speculator=make_speculator(config, draft, loaded, memory, limits, block_hash),
        runner=None if ranks is None else ParallelRunner(loaded, memory, swap_memory, ranks),
    )
    return Engine(loaded, memory, limits, block_hash, config.max_model_len, parts)
