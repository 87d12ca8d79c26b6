"""Allocates the memory of the KV blocks that a configuration describes: the pool and the swap space."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from quire.engine.config import EngineConfig
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.shared_memory import SharedMemory
from quire.engine.runner.control_groups import ControlGroups
from quire.engine.weights.loader import LoadedModel
from quire.kvindex.kv_layout import KvShape
from quire.settings.setting import SettingError

CPU_KV_BYTES = 256 << 20
"""Default size of a pool on the CPU, in bytes: 16k tokens of the largest model that is practical on a CPU."""

GPU_KV_SHARE = 0.8
"""Share of a GPU's free memory after loading the model, or of a process's part of it, for KV blocks.

The rest is for the forward pass.
"""


_GROUPS = ControlGroups()


def allocate_pool(
    config: EngineConfig,
    model: LoadedModel,
    draft: LoadedModel | None,
    device: torch.device,
    num_sharing: int = 1,
    *,
    num_copies: int = 1,
    cache_bytes: int = 0,
    share: Callable[[int], SharedMemory] | None = None,
) -> KvMemory:
    """Return the memory of the block pool.

    By default its size is a share of the device's memory, with room for the same number of draft model
    blocks.

    Args:
        num_sharing: number of processes that share the GPU, or the machine's memory, in equal parts.
        num_copies: copies of the weights that all of them share, one for each NUMA node with a worker.
        cache_bytes: memory on the host that the caller will use for further blocks.
        share: allocates a given number of bytes that other processes can map, for a pool on the CPU; None
            means private memory.

    Raises:
        SettingError: the pool would hold fewer than two blocks; or it does not fit into the memory of the
            machine or container; or sequences may be longer than the model allows.
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
        num_blocks = default_num_blocks(device, shape, draft_shape, num_sharing)
    if num_blocks < 2:
        raise SettingError(
            f"the pool must hold at least two blocks of {shape.block_bytes} bytes: "
            f"raise {config.name_of('kv_memory_bytes')}"
        )
    if model.heads.states is not None:
        _check_room_for_states(config, shape, num_blocks, model.heads.states.num_bytes)
    num_bytes = num_blocks * shape.block_bytes
    host_bytes = config.swap_space_bytes + cache_bytes
    if device.type == "cpu":
        host_bytes += num_bytes
        if draft is not None:
            host_bytes += num_blocks * draft.kv_shape(config.block_size).block_bytes
    check_memory(config, host_bytes, num_sharing, num_copies * model.shared_bytes)
    shared = None if share is None or device.type != "cpu" else share(num_bytes)
    return KvMemory(shape, num_blocks, device, shared=shared, own_heads=model.own_kv_heads)


def _check_room_for_states(config: EngineConfig, shape: KvShape, num_blocks: int, state_bytes: int) -> None:
    """Raise SettingError if a prompt could not get the blocks of one step, each of which holds states."""
    num_needed = shape.window_blocks + 2 + config.max_num_batched_tokens // shape.block_size
    if num_blocks < num_needed:
        size = config.name_of("kv_memory_bytes" if config.num_blocks is None else "num_blocks")
        raise SettingError(
            f"the pool has {num_blocks} blocks of {shape.block_bytes:,} bytes, {state_bytes:,} of them "
            f"states, and a prompt needs {num_needed}: raise {config.name_of('block_size')} or {size}"
        )


def default_num_blocks(
    device: torch.device, shape: KvShape, draft_shape: KvShape | None, num_sharing: int = 1
) -> int:
    """Return the default size of the block pool, in blocks; call this after the models are loaded.

    Args:
        device: the device of the pool.
        shape: the shape of the model's blocks.
        draft_shape: the shape of a draft model's blocks, if there is one. It needs as many blocks as the
            model, and on a GPU the result leaves room for them.
        num_sharing: number of processes that share the GPU in equal parts.
    """
    if device.type == "cpu":
        return CPU_KV_BYTES // shape.block_bytes
    num_free, num_bytes = torch.cuda.mem_get_info(device)
    # Another process that starts at the same time may still need its part of the free memory.
    num_ours = num_bytes // num_sharing - torch.cuda.memory_reserved(device)
    draft_bytes = 0 if draft_shape is None else draft_shape.block_bytes
    return int(max(0, min(num_free, num_ours)) * GPU_KV_SHARE) // (shape.block_bytes + draft_bytes)


def check_memory(
    config: EngineConfig,
    block_bytes: int,
    num_sharing: int,
    shared_bytes: int = 0,
    groups: ControlGroups = _GROUPS,
) -> None:
    """Check that the blocks and models of all workers fit into the memory of this machine or container.

    The system gives a process memory when it first writes there. It would kill a worker when its blocks fill.

    Args:
        block_bytes: memory on the host for the blocks of this process, whose model is loaded.
        num_sharing: number of such processes.
        shared_bytes: memory for weights that all of them share.

    Raises:
        SettingError: they do not fit.
    """
    model_bytes = _private_bytes() * config.tensor_parallel_size
    needed, available = num_sharing * (block_bytes + model_bytes) + shared_bytes, groups.memory_bytes()
    if needed <= available:
        return
    who = f"each of {num_sharing} workers needs" if num_sharing > 1 else "this process needs"
    sizes = ("kv_memory_bytes", "num_blocks", "swap_space_bytes", "host_cache_bytes")
    names = [config.name_of(size) for size in sizes if hasattr(config, size)]
    raise SettingError(
        f"{who} {block_bytes >> 20} MiB for blocks beside {model_bytes >> 20} MiB for its model, "
        f"{f'all share {shared_bytes >> 20} MiB of weights, ' if shared_bytes else ''}and "
        f"{available >> 20} MiB are here in all: lower {', '.join(names[:-1])} or {names[-1]}, or raise the "
        "container's memory limit"
    )


def _private_bytes() -> int:
    """Return the memory of this process alone, such as its weights; 0 if the system does not say.

    It has neither weights that workers share, nor mapped files, which the system can read again. Libraries
    that several workers have imported together count in part.
    """
    with suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return 0


def allocate_swap_space(config: EngineConfig, memory: KvMemory) -> KvMemory | None:
    """Return host memory for the blocks of preempted requests; None if it holds no block."""
    num_blocks = config.swap_space_bytes // memory.shape.block_bytes
    is_pinned = memory.device.type == "cuda"
    return (
        KvMemory(memory.shape, num_blocks, torch.device("cpu"), is_pinned=is_pinned, is_pool=False)
        if num_blocks
        else None
    )
