"""Tile sizes of the kernels, from a table. Nothing is tuned at run time, so all runs use the same sizes.

The table is ``configs.json``, which ``python -m quire.benchmarks.tune_kernels`` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

import torch
import triton

Kernel = Literal["prefill", "decode"]
_LATENTS = 1024
"""``head_dim`` of the rows for latents that are too large for the other rows."""
NUM_SPLIT_PROGRAMS = 512
"""Splits of the longest sequence over all KV heads; enough to use all multiprocessors of any device."""


@dataclass(frozen=True)
class AttentionConfig:
    """One row of the table: the cases that it applies to, and the tile sizes of the kernel.

    Attributes:
        arch: ``sm_80`` or ``sm_90``.
        kernel: the kernel, prefill or decode.
        kv_bits: bits of a stored key's element; 32 also applies to float32 queries over 8-bit blocks.
        head_dim: a power of two; the model's head_dim is padded to it. Rows for more than 256 are those of
            latent attention.
        block_size: the smallest block size that the row applies to.
        block_m: rows of a program: new tokens times query heads per KV head.
        block_n: keys per tile.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        split_tokens: tokens of the shortest split of a sequence in decode; 0 in prefill.
    """

    arch: str
    kernel: Kernel
    kv_bits: int
    head_dim: int
    block_size: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    split_tokens: int


@cache
def table() -> tuple[AttentionConfig, ...]:
    """Return all rows of ``configs.json``."""
    text = files("quire.kernels.triton").joinpath("configs.json").read_text(encoding="utf-8")
    return tuple(AttentionConfig(**row) for row in json.loads(text))


@cache
def find_config(kernel: Kernel, arch: str, kv_bits: int, head_dim: int, block_size: int) -> AttentionConfig:
    """Return the row with the largest block size up to ``block_size``, or else with the smallest.

    With latent attention, ``head_dim`` is that of a latent and its rotated key together.

    Raises:
        LookupError: the table has no row for the kernel, architecture, bits and head_dim.
    """
    padded = max(triton.next_power_of_2(head_dim), 32) if head_dim <= 256 else _LATENTS
    rows = [
        row
        for row in table()
        if (row.kernel, row.arch, row.kv_bits, row.head_dim) == (kernel, arch, kv_bits, padded)
    ]
    if not rows:
        raise LookupError(f"configs.json has no {kernel} row for {arch}, {kv_bits} bits, head_dim {padded}")
    rows.sort(key=lambda row: (row.block_size > block_size, -row.block_size))
    return rows[0] if rows[0].block_size <= block_size else rows[-1]


def max_splits(num_kv_heads: int) -> int:
    """Return the most splits of a sequence, which depends only on the model."""
    return min(max(NUM_SPLIT_PROGRAMS // num_kv_heads, 8), 128)


def kv_bits_of(query: torch.Tensor, kv_layer: torch.Tensor) -> int:
    """Return the ``AttentionConfig.kv_bits`` of the rows for these tensors."""
    return 32 if query.dtype == torch.float32 else 8 * kv_layer.element_size()


@cache
def arch_of(device: torch.device) -> str:
    """Return the ``arch`` of a device's rows; Triton's interpreter uses those of sm_80.

    Raises:
        RuntimeError: the device's compute capability is below 8.0.
    """
    if device.type != "cuda":
        return "sm_80"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(f"the kernels need compute capability 8.0, this device has {major}.{minor}")
    # A program has at least 99 KiB of shared memory on 8.x and 12.x, and 227 KiB on 9.0 to 11.x.
    return "sm_80" if major in (8, 12) else "sm_90"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return a device's number of multiprocessors; 1 for Triton's interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
