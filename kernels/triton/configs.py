"""How the kernels are cut, from a table: nothing is tuned at run time, so nothing changes from run to run.

The table is ``configs.json``, written by ``python -m quire.benchmarks.tune_kernels``.
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
NUM_SPLIT_PROGRAMS = 512
"""Splits of the longest sequence over all KV heads: enough for each multiprocessor of the largest device."""


@dataclass(frozen=True)
class AttentionConfig:
    """One row of the table: where it applies, and how the kernel is cut there.

    Attributes:
        arch: ``sm_80`` or ``sm_90``.
        kernel: which kernel.
        kv_bits: of a stored key's element; 32 is also what float32 queries of 8-bit blocks take.
        head_dim: a power of two, at least the model's.
        block_size: the smallest for which the row applies.
        block_m: rows of a program: new tokens times query heads per KV head.
        block_n: keys at a time.
        num_warps: per program.
        num_stages: of the software pipeline.
        split_tokens: the shortest split of a sequence in decode; 0 in prefill.
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
    """Return all rows."""
    text = files("quire.kernels.triton").joinpath("configs.json").read_text(encoding="utf-8")
    return tuple(AttentionConfig(**row) for row in json.loads(text))


@cache
def find_config(kernel: Kernel, arch: str, kv_bits: int, head_dim: int, block_size: int) -> AttentionConfig:
    """Return the row that applies: the one of the largest block size up to ours, else the smallest."""
    padded = max(triton.next_power_of_2(head_dim), 32)
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
    """Return into how many splits a sequence is cut at most: a property of the model alone."""
    return min(max(NUM_SPLIT_PROGRAMS // num_kv_heads, 8), 128)


def kv_bits_of(query: torch.Tensor, kv_layer: torch.Tensor) -> int:
    """Return ``AttentionConfig.kv_bits`` for these tensors."""
    return 32 if query.dtype == torch.float32 else 8 * kv_layer.element_size()


@cache
def arch_of(device: torch.device) -> str:
    """Return which rows a device takes; the interpreter takes those of sm_80."""
    if device.type != "cuda":
        return "sm_80"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(f"the kernels need compute capability 8.0, this device has {major}.{minor}")
    # Of 12.x, as of 8.x, a program has 99 KiB of shared memory; 9.0 to 11.x have 227.
    return "sm_80" if major in (8, 12) else "sm_90"


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return how many programs run at once at least."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
