"""The Triton kernels that write tokens into blocks and copy whole blocks."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.quantization_kernels import LOWEST_MAGNITUDE, encode_values


@triton.jit
def _block_scale(
    tensor,
    vector,
    is_inside,
    scales,
    stored,
    is_head,
    first,
    is_first_here,
    stride_token,
    SCALE: tl.constexpr,
):
    """Return each head's scale: computed from slot 0's token if this launch writes it, else stored."""
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
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Write the key and value of one token and BLOCK_H heads. The grid is (tokens, head tiles).

    HEAD_DIM and VALUE_DIM, the elements of a key and of a value, are at most BLOCK_D.
    """
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
    is_inside_value = is_head[:, None] & (d < VALUE_DIM)[None, :]
    key_vector = head[:, None] * stride_key_head + d[None, :]
    value_vector = head[:, None] * stride_value_head + d[None, :]
    k = tl.load(key + token * stride_key_token + key_vector, mask=is_inside)
    v = tl.load(value + token * stride_value_token + value_vector, mask=is_inside_value)
    if kv_scales is not None:
        first = token - offset
        is_first_here = first >= 0
        if is_first_here:
            is_first_here = tl.load(slot_mapping + first) == block * BLOCK_SIZE
        key_stored = block * stride_scale_block + head * stride_scale_head
        value_stored = key_stored + stride_scale_value
        key_scale = _block_scale(
            key, key_vector, is_inside, kv_scales, key_stored, is_head, first, is_first_here,
            stride_key_token, SCALE,
        )  # fmt: skip
        value_scale = _block_scale(
            value, value_vector, is_inside_value, kv_scales, value_stored, is_head, first, is_first_here,
            stride_value_token, SCALE,
        )  # fmt: skip
        if offset == 0:
            tl.store(kv_scales + key_stored, key_scale, mask=is_head)
            tl.store(kv_scales + value_stored, value_scale, mask=is_head)
        k = encode_values(tl.div_rn(k.to(tl.float32), key_scale[:, None]), KV_FORMAT)
        v = encode_values(tl.div_rn(v.to(tl.float32), value_scale[:, None]), KV_FORMAT)
    target = kv + block * stride_block + offset * stride_slot + head[:, None].to(tl.int64) * stride_head
    tl.store(target + d[None, :], k, mask=is_inside)
    tl.store(target + stride_value + d[None, :], v, mask=is_inside_value)


@triton.jit(do_not_specialize=["stride_target_id", "stride_source_id"])
def copy_rows_kernel(
    target,
    source,
    target_ids,
    source_ids,
    num_pairs,
    stride_target,
    stride_source,
    stride_target_id,
    stride_source_id,
    PAIRS: tl.constexpr,
):
    """Copy ``source[source_ids[i]]`` to ``target[target_ids[i]]``; if an argument of ids is None, use row i.

    The grid is (rows, parts of a row).
    """
    row = tl.program_id(0).to(tl.int64)
    target_row = row
    if target_ids is not None:
        target_row = tl.load(target_ids + row * stride_target_id).to(tl.int64)
    source_row = row
    if source_ids is not None:
        source_row = tl.load(source_ids + row * stride_source_id).to(tl.int64)
    word = tl.program_id(1).to(tl.int64) * (2 * PAIRS) + tl.arange(0, 2 * PAIRS)
    # Words are counted in pairs. The compiler thus knows that both words of a pair exist, and reads or writes
    # 16 bytes in one access.
    is_word = word < num_pairs * 2
    words = tl.load(source + source_row * stride_source + word, mask=is_word)
    tl.store(target + target_row * stride_target + word, words, mask=is_word)
