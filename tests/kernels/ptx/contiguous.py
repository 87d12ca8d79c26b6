"""The attention kernels over one sequence whose keys and values lie in order, to measure what paging costs.

They are the shipped source with one function replaced: the one that finds keys.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from quire.kernels.triton import attention, attention_kernels


@triton.jit
def _count_from_the_start(
    table,
    start,
    is_known,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the place of ``_find_keys``: a key's slot is its position, in one block."""
    return tl.zeros([BLOCK_N], tl.int32), start + tl.arange(0, BLOCK_N)


@triton.jit
def _count_from_the_tile(
    table,
    start,
    is_known,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the place of ``_find_keys``: the keys of a tile follow the first one of the block it begins in."""
    block = (start.to(tl.uint32) // BLOCK_SIZE).to(tl.int64)
    return tl.zeros([BLOCK_N], tl.int64) + block, tl.arange(0, BLOCK_N)


CONTIGUOUS = (_count_from_the_start, _count_from_the_tile)
"""Ways to find a key without a table; which one takes fewer instructions depends on the kernel."""


@cache
def _kernels_with(find_keys: Any) -> ModuleType:
    spec = spec_from_file_location("tests.kernels.ptx.contiguous_attention", attention_kernels.__file__)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "_find_keys")
    vars(module)["_find_keys"] = find_keys
    return module


@contextmanager
def contiguous_kernels(find_keys: Any) -> Iterator[None]:
    """Inside the context, ``paged_attention`` launches kernels that find keys by one of ``CONTIGUOUS``."""
    kernels = _kernels_with(find_keys)
    with (
        patch.object(attention, "decode_kernel", kernels.decode_kernel),
        patch.object(attention, "prefill_kernel", kernels.prefill_kernel),
    ):
        yield


def lay_out_contiguously(blocks: torch.Tensor) -> torch.Tensor:
    """Return a sequence's blocks ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, which are in order,
    as a view of a cache ``[2, num_kv_heads, num_blocks * block_size, head_dim]``.
    """
    return blocks.permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
