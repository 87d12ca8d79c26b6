"""Writes tokens into blocks, and copies whole blocks, on GPUs.

A block's bytes are contiguous. A block of all layers is copied as 16-byte words, regardless of its content.
"""

from __future__ import annotations

import torch
import triton

from quire.kernels.quantization import KV_FORMATS
from quire.kernels.triton import checks
from quire.kernels.triton.block_kernels import copy_rows_kernel, write_kv_kernel

_ELEMENTS_PER_PROGRAM = 4096
_PAIRS_PER_PROGRAM = 1024


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write keys and values ``[num_tokens, num_kv_heads, head_dim]`` into their slots.

    Tokens with a slot below 0 are skipped. 8-bit blocks get quantized tokens, and the token in slot 0 sets
    its block's scale. The tokens of a block must be consecutive and in order: if the token for slot 0 is in
    the batch, the token i rows after it is the one for slot i. With latent attention the key is a whole row,
    whose two parts have scales of their own, and the value is its latent.

    Raises:
        ValueError: shapes, strides or dtypes do not fit together.
    """
    checks.check_write(key, value, kv_layer, slot_mapping, kv_scales)
    _, num_parts, num_kv_heads, block_size, head_dim = kv_layer.shape
    if not key.shape[0]:
        return
    strides = kv_layer.stride()[:4]
    if num_parts == 1:
        # The rotated key is written in the place of a value.
        key, value = key.split([value.shape[2], head_dim - value.shape[2]], dim=2)
        head_dim, strides = key.shape[2], (strides[0], key.shape[2], *strides[2:])
    kv_format = KV_FORMATS.get(kv_layer.dtype)
    block_d = triton.next_power_of_2(max(head_dim, value.shape[2]))
    block_h = min(triton.next_power_of_2(num_kv_heads), max(_ELEMENTS_PER_PROGRAM // block_d, 1))
    grid = (key.shape[0], triton.cdiv(num_kv_heads, block_h))
    with torch.cuda.device_of(kv_layer):  # type: ignore[no-untyped-call]
        write_kv_kernel[grid](
            key,
            value,
            checks.as_storable(kv_layer),
            kv_scales,
            slot_mapping,
            num_kv_heads,
            *key.stride()[:2],
            *value.stride()[:2],
            *strides,
            *(kv_scales.stride() if kv_scales is not None else (0, 0, 0)),
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            VALUE_DIM=value.shape[2],
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            KV_FORMAT=kv_format.name if kv_format else None,
            SCALE=kv_format.scale_per_magnitude if kv_format else 1.0,
            num_warps=4,
            enable_fp_fusion=True,
        )


def copy_blocks(blocks: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy each block ``pairs[i, 0]`` of ``blocks[num_blocks, ...]`` to block ``pairs[i, 1]``, all layers.

    No block may be in both columns, or twice in the second, since all copies run concurrently.

    Raises:
        ValueError: shapes, strides or dtypes do not fit together.
    """
    checks.check_blocks_are_runs("blocks", blocks)
    checks.check_ids("pairs", pairs, (pairs.shape[0], 2), blocks.device)
    _copy_rows(blocks, blocks, target_ids=pairs[:, 1], source_ids=pairs[:, 0], num_rows=pairs.shape[0])


def gather_blocks(blocks: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy ``blocks[ids[i]]`` to ``out[i]``.

    Raises:
        ValueError: shapes, strides or dtypes do not fit together.
    """
    checks.check_staging(blocks, ids, out)
    _copy_rows(out, blocks, target_ids=None, source_ids=ids, num_rows=ids.shape[0])


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy ``staging[i]`` to ``blocks[ids[i]]``; no id may occur twice.

    Raises:
        ValueError: shapes, strides or dtypes do not fit together.
    """
    checks.check_staging(blocks, ids, staging)
    _copy_rows(blocks, staging, target_ids=ids, source_ids=None, num_rows=ids.shape[0])


def _copy_rows(
    target: torch.Tensor,
    source: torch.Tensor,
    *,
    target_ids: torch.Tensor | None,
    source_ids: torch.Tensor | None,
    num_rows: int,
) -> None:
    target, source = _as_words(target), _as_words(source)
    if not num_rows:
        return
    num_pairs = target.shape[1] // 2
    grid = (num_rows, triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM))
    with torch.cuda.device_of(target):  # type: ignore[no-untyped-call]
        copy_rows_kernel[grid](
            target,
            source,
            target_ids,
            source_ids,
            num_pairs,
            target.stride(0),
            source.stride(0),
            target_ids.stride(0) if target_ids is not None else 0,
            source_ids.stride(0) if source_ids is not None else 0,
            PAIRS=_PAIRS_PER_PROGRAM,
            num_warps=4,
            enable_fp_fusion=True,
        )


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """View blocks as rows of int64 words; a thread reads or writes pairs of them in 16-byte accesses."""
    return blocks.flatten(1).view(torch.uint8).view(torch.int64)
