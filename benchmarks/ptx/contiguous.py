"""The attention kernels over one sequence whose keys and values lie in order, to measure what paging costs.

They are the shipped source with one function replaced: the one that finds a key's row.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from quire.kernels.triton import attention, attention_kernels


@triton.jit
def _find_contiguous_rows(
    table,
    key_position,
    is_known,
    stride_block,
    stride_slot,
    stride_scale_block,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute what ``_find_rows`` looks up, with 32 bits, as the best contiguous kernel would."""
    return key_position * stride_slot, key_position // BLOCK_SIZE * stride_scale_block


@cache
def _contiguous_kernels() -> ModuleType:
    path = attention_kernels.__file__
    spec = spec_from_file_location("quire.benchmarks.ptx.contiguous_attention_kernels", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert hasattr(module, "_find_rows")
    vars(module)["_find_rows"] = _find_contiguous_rows
    return module


@contextmanager
def contiguous_kernels() -> Iterator[None]:
    """Inside the context, ``paged_attention`` ignores block tables and launches the contiguous kernels."""
    kernels = _contiguous_kernels()
    with (
        patch.object(attention, "decode_kernel", kernels.decode_kernel),
        patch.object(attention, "prefill_kernel", kernels.prefill_kernel),
    ):
        yield


def lay_out_contiguously(blocks: torch.Tensor) -> torch.Tensor:
    """Return a sequence's blocks ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``, in order, as a view
    of a cache ``[2, num_kv_heads, num_blocks * block_size, head_dim]``."""
    num_blocks, parts, num_kv_heads, block_size, head_dim = blocks.shape
    cache = blocks.permute(1, 2, 0, 3, 4).contiguous()
    assert cache.shape == (parts, num_kv_heads, num_blocks, block_size, head_dim)
    return cache.permute(2, 0, 1, 3, 4)
