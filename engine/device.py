"""Chooses the device that a model runs on, and how much of its memory KV blocks take."""

from __future__ import annotations

import torch

from quire.kvindex.kv_layout import KvShape

DEVICES = ("auto", "cpu", "cuda")

CPU_KV_BYTES = 256 << 20
"""Default size of a pool on the CPU, in bytes: 16k tokens of the largest model that one would run there."""

GPU_KV_SHARE = 0.8
"""Share of the free memory of a process's part of a GPU, once the model is loaded, that KV blocks take.

The rest is for the forward pass.
"""


def choose_device(name: str = "auto") -> torch.device:
    """Return the device with a name of ``DEVICES``; "auto" is a GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such device.
    """
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {name!r}")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ValueError(
            "device 'cuda' needs a GPU that torch can use, and there is none: choose 'cpu' or 'auto'"
        )
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


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
    # Another process that is starting now may take its part of the memory that is still free.
    num_ours = num_bytes // num_sharing_gpu - torch.cuda.memory_reserved(device)
    draft_bytes = 0 if draft_shape is None else draft_shape.block_bytes
    return int(max(0, min(num_free, num_ours)) * GPU_KV_SHARE) // (shape.block_bytes + draft_bytes)
