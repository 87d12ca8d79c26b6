"""On which device a model runs, and how much of it KV blocks may take."""

from __future__ import annotations

import torch

from quire.engine.kv_memory import KvShape

DEVICES = ("auto", "cpu", "cuda")

CPU_KV_BYTES = 256 << 20
"""Size of a pool on the CPU, unless it is given: 16k tokens of the largest model one would run there."""

GPU_KV_SHARE = 0.8
"""Of what a process' part of a GPU has free once the model is loaded; the rest is for the forward pass."""


def choose_device(name: str = "auto") -> torch.device:
    """Return the device of a name; "auto" is a GPU where there is one.

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
    """Return the size of a block pool that nobody has chosen; the models must be loaded.

    Args:
        draft_shape: of a draft model, which needs as many blocks: on a GPU there is room left for them.
        num_sharing_gpu: processes that take such a part of the GPU.
    """
    if device.type == "cpu":
        return CPU_KV_BYTES // shape.block_bytes
    num_free, num_bytes = torch.cuda.mem_get_info(device)
    # What is free now may be what a process that starts beside this one will take.
    num_ours = num_bytes // num_sharing_gpu - torch.cuda.memory_reserved(device)
    draft_bytes = 0 if draft_shape is None else draft_shape.block_bytes
    return int(max(0, min(num_free, num_ours)) * GPU_KV_SHARE) // (shape.block_bytes + draft_bytes)
