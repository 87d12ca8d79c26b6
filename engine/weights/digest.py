"""The digest of a model. Two processes with equal digests compute the same keys and values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import xxhash

_ROUNDINGS = {"int4": "int4, best of 8 scales"}
"""Types whose weights older workers round in another way, so that they must not share blocks."""


def model_digest(
    folder: Path, names: Iterable[str], read: Callable[[str], torch.Tensor], weight_dtype: str
) -> str:
    """Return a digest of a model's ``config.json`` and of every byte of its loaded weights, in hex.

    The digest covers the loaded tensors and not the files. It therefore includes all weights that the model
    uses, however the checkpoint is stored. XXH3 runs at the speed of memory. It detects different weights,
    but it does not resist an attacker who builds a checkpoint with the same digest.

    Args:
        folder: the model's folder, which has the configuration.
        names: the names of the model's tensors.
        read: returns a tensor on the CPU as the model loads it, before layers are packed; called in several
            threads.
        weight_dtype: the type of linear layers' packed weights. It is part of the digest, since quantized
            weights give other keys and values.
    """
    configuration = json.loads((folder / "config.json").read_text("utf-8"))
    state = hashlib.sha256(json.dumps(configuration, sort_keys=True).encode())
    state.update(f"\n{_ROUNDINGS.get(weight_dtype, weight_dtype)}".encode())
    with ThreadPoolExecutor() as pool:  # xxhash releases the GIL
        for description in pool.map(lambda name: describe_tensor(name, read(name)), sorted(names)):
            state.update(description)
    return state.hexdigest()[:32]


def describe_tensor(name: str, tensor: torch.Tensor) -> bytes:
    """Return the name, type, shape and digest of a tensor on the CPU."""
    digest = xxhash.xxh3_128_digest(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"\n{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + digest
