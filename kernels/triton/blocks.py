"""Writing tokens into blocks, and copying whole blocks.

A block's bytes are one run, whatever they mean: a block of all layers is copied as 16-byte words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton import checks
from quire.kernels.triton.quantization import KV_FORMATS, LOWEST_MAGNITUDE, encode_values

_ELEMENTS_PER_PROGRAM = 4096
_WORDS_PER_PROGRAM = 2048


@triton.jit
def _block_scale(
    tensor, vector, is_inside, scales, stored, is_head, first, is_first_here, stride_token, SCALE: tl.constexpr
):
    """Return each head's scale: from the token in slot 0 if this launch writes it, else the stored one."""
    if is_first_here:
        x = tl.load(tensor + first * stride_token + vector, mask=is_inside, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(x), axis=1), LOWEST_MAGNITUDE) * SCALE
    else:
        scale = tl.load(scales + stored, mask=is_head, other=1.0)
    return scale


@triton.jit
def write_kv_kernel(
    key,
    value,
    kv,
    kv_scales,
    slot_mapping,
    num_kv_heads,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_block,
    stride_value,
    stride_head,
    stride_slot,
    stride_scale_block,
    stride_scale_value,
    stride_scale_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the key and value of one token and BLOCK_H heads: grid (tokens, head tiles)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    is_head = head < num_kv_heads
    is_inside = is_head[:, None] & (d < HEAD_DIM)[None, :]
    key_vector = head[:, None] * stride_key_head + d[None, :]
    value_vector = head[:, None] * stride_value_head + d[None, :]
    k = tl.load(key + token * stride_key_token + key_vector, mask=is_inside)
    v = tl.load(value + token * stride_value_token + value_vector, mask=is_inside)
    if kv_scales is not None:
        first = token - offset
        is_first_here = first >= 0
        if is_first_here:
            is_first_here = tl.load(slot_mapping + first) == block * BLOCK_SIZE
        key_stored = block * stride_scale_block + head * stride_scale_head
        value_stored = key_stored + stride_scale_value
        key_scale = _block_scale(
            key, key_vector, is_inside, kv_scales, key_stored, is_head, first, is_first_here, stride_key_token,
            SCALE,
        )  # fmt: skip
        value_scale = _block_scale(
            value, value_vector, is_inside, kv_scales, value_stored, is_head, first, is_first_here,
            stride_value_token, SCALE,
        )  # fmt: skip
        if offset == 0:
            tl.store(kv_scales + key_stored, key_scale, mask=is_head)
            tl.store(kv_scales + value_stored, value_scale, mask=is_head)
        k = encode_values(tl.div_rn(k.to(tl.float32), key_scale[:, None]), KV_FORMAT)
        v = encode_values(tl.div_rn(v.to(tl.float32), value_scale[:, None]), KV_FORMAT)
    target = kv + block * stride_block + offset * stride_slot + head[:, None].to(tl.int64) * stride_head
    tl.store(target + d[None, :], k, mask=is_inside)
    tl.store(target + stride_value + d[None, :], v, mask=is_inside)


@triton.jit
def copy_rows_kernel(
    target,
    source,
    target_ids,
    source_ids,
    num_words,
    stride_target,
    stride_source,
    stride_target_id,
    stride_source_id,
    WORDS: tl.constexpr,
):
    """Copy ``source[source_ids[i]]`` to ``target[target_ids[i]]``; without ids, row i: grid (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    target_row = row
    if target_ids is not None:
        target_row = tl.load(target_ids + row * stride_target_id).to(tl.int64)
    source_row = row
    if source_ids is not None:
        source_row = tl.load(source_ids + row * stride_source_id).to(tl.int64)
    word = tl.program_id(1).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_word = word < num_words
    words = tl.load(source + source_row * stride_source + word, mask=is_word)
    tl.store(target + target_row * stride_target + word, words, mask=is_word)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write keys and values ``[num_tokens, num_kv_heads, head_dim]`` into their slots; slots below 0 are skipped.

    Into 8-bit blocks they are quantized, and the token in slot 0 sets its block's scale. A step writes the
    tokens of a block one after the other: the token ``i`` places after slot 0's is in slot i.

    Raises:
        ValueError: shapes, strides or dtypes do not fit together.
    """
    checks.check_write(key, value, kv_layer, slot_mapping, kv_scales)
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    if not key.shape[0]:
        return
    kv_format = KV_FORMATS.get(kv_layer.dtype)
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_kv_heads), max(_ELEMENTS_PER_PROGRAM // block_d, 1))
    grid = (key.shape[0], triton.cdiv(num_kv_heads, block_h))
    write_kv_kernel[grid](
        key,
        value,
        checks.as_storable(kv_layer),
        kv_scales,
        slot_mapping,
        num_kv_heads,
        *key.stride()[:2],
        *value.stride()[:2],
        *kv_layer.stride()[:4],
        *(kv_scales.stride() if kv_scales is not None else (0, 0, 0)),
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        KV_FORMAT=kv_format.name if kv_format else None,
        SCALE=kv_format.scale_per_magnitude if kv_format else 1.0,
        num_warps=4,
    )


def copy_blocks(blocks: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy each block ``pairs[i, 0]`` to ``pairs[i, 1]``, all layers at once: ``blocks[num_blocks, ...]``.

    No block may be in both columns, or twice in the second: the copies happen at once.

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
    num_words = target.shape[1]
    grid = (num_rows, triton.cdiv(num_words, _WORDS_PER_PROGRAM))
    copy_rows_kernel[grid](
        target,
        source,
        target_ids,
        source_ids,
        num_words,
        target.stride(0),
        source.stride(0),
        target_ids.stride(0) if target_ids is not None else 0,
        source_ids.stride(0) if source_ids is not None else 0,
        WORDS=_WORDS_PER_PROGRAM,
        num_warps=4,
    )


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """View blocks as int64 rows: a thread's neighbouring pairs of them become 16-byte accesses."""
    return blocks.flatten(1).view(torch.uint8).view(torch.int64)
