"""The digest of a model, which must be equal for two processes to compute the same keys and values."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash


def model_digest(folder: Path, module: torch.nn.Module, weight_dtype: str) -> str:
    """Return a digest of a model's ``config.json`` and of every byte of its loaded weights, in hex.

    The loaded tensors are hashed, not the files, so the digest covers all weights that the model computes
    with, however the checkpoint is stored. XXH3 runs at the speed of memory. It detects different weights,
    but it does not resist an attacker who builds a checkpoint with the same digest.

    Args:
        folder: the model's folder, which has the configuration.
        module: the model as it was loaded, on the CPU, before its layers are packed.
        weight_dtype: the type of linear layers' weights once they are packed, which belongs to the digest:
            quantized weights give other keys and values.
    """
    configuration = json.loads((folder / "config.json").read_text("utf-8"))
    state = hashlib.sha256(json.dumps(configuration, sort_keys=True).encode())
    state.update(f"\n{weight_dtype}".encode())
    tensors = sorted(module.state_dict().items())
    with ThreadPoolExecutor() as pool:  # xxhash releases the GIL
        digests = pool.map(_tensor_digest, (tensor for _, tensor in tensors))
        for (name, tensor), digest in zip(tensors, digests, strict=True):
            state.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + digest)
    return state.hexdigest()[:32]


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
