"""Allocates the memory of the KV blocks that a configuration describes: the pool and the swap space."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from quire.engine.config import EngineConfig
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.shared_memory import SharedMemory
from quire.engine.weights.loader import LoadedModel
from quire.kvindex.kv_layout import KvShape
from quire.settings.setting import SettingError

CPU_KV_BYTES = 256 << 20
"""Default size of a pool on the CPU, in bytes: 16k tokens of the largest model that is practical on a CPU."""

GPU_KV_SHARE = 0.8
"""Share of a GPU's free memory after loading the model, or of a process's part of it, for KV blocks.

The rest is for the forward pass.
"""


def allocate_pool(
    config: EngineConfig,
    model: LoadedModel,
    draft: LoadedModel | None,
    device: torch.device,
    num_sharing_gpu: int = 1,
    *,
    share: Callable[[int], SharedMemory] | None = None,
) -> KvMemory:
    """Return the memory of the block pool.

    By default its size is a share of the device's memory, with room for the same number of draft model
    blocks.

    Args:
        num_sharing_gpu: number of processes that share the GPU in equal parts.
        share: allocates a given number of bytes that other processes can map, for a pool on the CPU; None
            means private memory.

    Raises:
        SettingError: the pool would hold fewer than two blocks, or more than the machine's memory; or
            sequences may be longer than the model allows.
        OSError: the pool is to be shared, and the system has no such memory.
    """
    if config.max_model_len is not None and config.max_model_len > model.max_position_embeddings:
        raise SettingError(
            f"{config.name_of('max_model_len')} is {config.max_model_len}, and the model takes at most "
            f"{model.max_position_embeddings} tokens: give at most these"
        )
    shape = model.kv_shape(config.block_size, config.kv_cache_dtype)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_memory_bytes is not None:
        num_blocks = config.kv_memory_bytes // shape.block_bytes
    else:
        draft_shape = None if draft is None else draft.kv_shape(config.block_size)
        num_blocks = default_num_blocks(device, shape, draft_shape, num_sharing_gpu)
    if num_blocks < 2:
        raise SettingError(
            f"the pool must hold at least two blocks of {shape.block_bytes} bytes: "
            f"raise {config.name_of('kv_memory_bytes')}"
        )
    num_bytes = num_blocks * shape.block_bytes
    available = host_memory_bytes()
    if device.type == "cpu" and num_bytes > available:
        raise SettingError(
            f"{num_blocks} blocks take {num_bytes >> 20} MiB, and there are {available >> 20} MiB here: "
            f"lower {config.name_of('kv_memory_bytes')} or {config.name_of('num_blocks')}"
        )
    shared = None if share is None or device.type != "cpu" else share(num_bytes)
    return KvMemory(shape, num_blocks, device, shared=shared, own_heads=model.own_kv_heads)


def default_num_blocks(
    device: torch.device, shape: KvShape, draft_shape: KvShape | None, num_sharing_gpu: int = 1
) -> int:
    """Return the default size of the block pool, in blocks; call this after the models are loaded.

    Args:
        device: the device of the pool.
        shape: the shape of the model's blocks.
        draft_shape: the shape of a draft model's blocks, if there is one. It needs as many blocks as the
            model, and on a GPU the result leaves room for them.
        num_sharing_gpu: number of processes that share the GPU in equal parts.
    """
    if device.type == "cpu":
        return CPU_KV_BYTES // shape.block_bytes
    num_free, num_bytes = torch.cuda.mem_get_info(device)
    # Another process that starts at the same time may still need its part of the free memory.
    num_ours = num_bytes // num_sharing_gpu - torch.cuda.memory_reserved(device)
    draft_bytes = 0 if draft_shape is None else draft_shape.block_bytes
    return int(max(0, min(num_free, num_ours)) * GPU_KV_SHARE) // (shape.block_bytes + draft_bytes)


def host_memory_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine, or the limit of its container if that is lower."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        # Without a limit, the file of version 2 says "max".
        with suppress(OSError, ValueError):
            return min(machine, int((cgroups / name).read_text()))
    return machine


def allocate_swap_space(config: EngineConfig, memory: KvMemory) -> KvMemory | None:
    """Return host memory for the blocks of preempted requests; None if it holds no block."""
    num_blocks = config.swap_space_bytes // memory.shape.block_bytes
    is_pinned = memory.device.type == "cuda"
    return (
        KvMemory(memory.shape, num_blocks, torch.device("cpu"), is_pinned=is_pinned) if num_blocks else None
    )
