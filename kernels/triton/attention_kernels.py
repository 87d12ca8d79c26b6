"""The Triton kernels of paged attention.

A program's rows are consecutive new tokens of one sequence times the query heads that share a KV head. One
matrix product therefore uses a key for all rows, and K and V are read once per KV head. A program loops over
the sequence's block table (PagedAttention, Kwon et al., 2023), one tile of keys at a time, with a running
softmax (FlashAttention-2, Dao, 2023). Logits are in base 2, since the hardware computes ``exp2``.

::

    prefill          a program computes a tile of new tokens, over all keys that they see
    decode           a program computes one new token; its keys are divided into splits
    combine          merges the splits of a token (Flash-Decoding, Dao et al., 2023)

Positions define the tiles and splits, and a sequence's splits depend only on its own length. The result for a
token therefore does not depend on the other sequences in the batch. Arguments that change from step to step
are not specialized. Otherwise Triton would compile a kernel again, while requests wait, when such an argument
becomes 1 or a multiple of 16.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.quantization_kernels import decode_values

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(pointers, is_known, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Load vectors ``[rows, BLOCK_D]``, with zeros beyond head_dim and, if MASKED, in unknown rows."""
    d = tl.arange(0, BLOCK_D)
    if MASKED:
        return tl.load(pointers, mask=is_known[:, None] & (d < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(d < HEAD_DIM)[None, :], other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _find_keys(
    table,
    start,
    is_known,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return the block id, with 64 bits, and the slot of each key at ``start..start + BLOCK_N - 1``.

    ``start`` must be a multiple of BLOCK_N. Where whole blocks fill a tile, only the ids change from tile to
    tile. Divisions are unsigned, since a signed division takes several instructions.
    """
    offset = tl.arange(0, BLOCK_N).to(tl.uint32)
    if BLOCK_N % BLOCK_SIZE == 0:
        entries = table + start // BLOCK_SIZE + offset // BLOCK_SIZE
        slot = offset % BLOCK_SIZE
    else:
        position = (start + tl.arange(0, BLOCK_N)).to(tl.uint32)
        entries = table + position // BLOCK_SIZE
        slot = position % BLOCK_SIZE
    block = tl.load(entries, mask=is_known, other=0) if MASKED else tl.load(entries)
    # A block id times a stride may exceed 2^31.
    return block.to(tl.int64), slot.to(tl.int32)


@triton.jit
def _soft_cap(logits, cap):
    # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both infinities.
    return cap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E / cap)) + 1.0))


@triton.jit
def _first_seen(position, window, IS_CHUNKED: tl.constexpr):
    """Return the first position that tokens see in a window, or in their chunk, which is as large."""
    first = position // window * window if IS_CHUNKED else position - window + 1
    return tl.maximum(first, 0)


@triton.jit
def _attend(
    query,
    rest,
    peak,
    total,
    output,
    first,
    last,
    lowest,
    position,
    slopes,
    table,
    keys,
    values,
    key_scales,
    value_scales,
    scale,
    window,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_SCALE_BLOCK: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend over the keys at ``first..last - 1`` and return the running softmax (peak, total, output).

    ``peak`` is the row max and ``total`` the row sum. ``scale`` must be positive and ``first`` a multiple of
    BLOCK_N. Without MASKED each row sees each key. Keys before ``lowest`` or from ``last`` on are never read,
    since their slots may contain any data.

    With latent attention ``rest`` is the part of the query that is multiplied by rotated keys, which have
    REST_DIM elements and are in the place of the values. The values are the latents, which ``keys`` points
    to.
    """
    for start in range(first, last, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        is_known = (key_position >= lowest) & (key_position < last)
        block, slot = _find_keys(table, start, is_known, BLOCK_SIZE, BLOCK_N, MASKED)
        # The block's offset is added last, since the sum of the others is the same in each tile.
        vector = slot[:, None] * STRIDE_SLOT + tl.arange(0, BLOCK_D)[None, :]
        run = (block * STRIDE_BLOCK)[:, None]

        stored_k = _load_rows(keys + vector + run, is_known, HEAD_DIM, BLOCK_D, MASKED)
        k = decode_values(stored_k, query.dtype, KV_FORMAT)
        logits = tl.dot(query, tl.trans(k), input_precision="ieee")
        if key_scales is not None:
            key_scale = tl.load(key_scales + block * STRIDE_SCALE_BLOCK, mask=is_known, other=0.0)
            logits *= key_scale[None, :]
        if value_scales is not None:
            value_scale = tl.load(value_scales + block * STRIDE_SCALE_BLOCK, mask=is_known, other=0.0)
        if REST_DIM > 0:
            rest_vector = slot[:, None] * STRIDE_SLOT + tl.arange(0, BLOCK_R)[None, :]
            r = _load_rows(values + rest_vector + run, is_known, REST_DIM, BLOCK_R, MASKED)
            r = decode_values(r, query.dtype, KV_FORMAT)
            products = tl.dot(rest, tl.trans(r), input_precision="ieee")
            if value_scales is not None:
                logits = tl.fma(products, value_scale[None, :], logits)
            else:
                logits += products
        factor = scale * LOG2_E
        if softcap is not None or slopes is not None:
            logits *= scale
            factor = LOG2_E
        if softcap is not None:
            logits = _soft_cap(logits, softcap)
        if slopes is not None:
            distance = key_position[None, :] - position[:, None]
            logits += slopes[:, None] * distance.to(tl.float32)
        if MASKED:
            is_seen = is_known[None, :] & (key_position[None, :] <= position[:, None])
            if window is not None:
                first_seen = _first_seen(position, window, IS_CHUNKED)
                is_seen = is_seen & (key_position[None, :] >= first_seen[:, None])
            logits = tl.where(is_seen, logits, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(logits, axis=1) * factor)
        # A row that has seen no key yet has the row max -inf, and -inf - -inf is NaN.
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
        # The fma is explicit. Otherwise the compiler would fuse the operations only without masks, and a
        # token's last bits would depend on the chunk that it is in.
        weights = tl.exp2(tl.fma(logits, factor, -shift[:, None]))
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak

        if REST_DIM > 0:
            v = stored_k
            if key_scales is not None:
                weights *= key_scale[None, :]
        else:
            v = _load_rows(values + vector + run, is_known, HEAD_DIM, BLOCK_D, MASKED)
            if value_scales is not None:
                weights *= value_scale[None, :]
        # Scaled weights may be too small for float16.
        is_narrow: tl.constexpr = KV_FORMAT is not None and query.dtype == tl.float16
        value_dtype: tl.constexpr = tl.bfloat16 if is_narrow else query.dtype
        v = decode_values(v, value_dtype, KV_FORMAT)
        output = tl.dot(weights.to(value_dtype), v, output * decay[:, None], input_precision="ieee")
    return peak, total, output


@triton.jit
def _normalize(peak, total, output, sinks):
    """Divide the output by the softmax's denominator, to which a sink adds a term without a value."""
    if sinks is not None:
        sink = sinks * LOG2_E
        top = tl.maximum(peak, sink)
        decay = tl.exp2(peak - top)
        total = total * decay + tl.exp2(sink - top)
        output *= decay[:, None]
    # Rows behind the last token, whose outputs are not stored, may have seen no key.
    return output / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _find_sequence(query_starts, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the index of the sequence that a tile belongs to.

    Sequence i starts at tile ``query_starts[i] // BLOCK_Q + i``. Each sequence thus has enough tiles, and the
    host need not compute a list of tiles.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def prefill_kernel(
    output,
    query,
    kv,
    kv_scales,
    block_tables,
    query_starts,
    seq_lens,
    sinks,
    alibi_slopes,
    num_seqs,
    scale,
    window,
    softcap,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_head,
    stride_scale_value,
    stride_scale_head,
    stride_table,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_VALUE: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_SCALE_BLOCK: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Compute attention for the sequences with several new tokens. The grid is (tiles, KV heads)."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    # The last tiles see the most keys. They start first, so that no long program is left at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _find_sequence(query_starts, tile, num_seqs, BLOCK_Q)
    start = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - start
    first_token = (tile - start // BLOCK_Q - sequence) * BLOCK_Q
    if (num_new <= 1) | (first_token >= num_new):
        return

    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < BLOCK_Q * GROUP) & (token < num_new)
    num_cached = tl.load(seq_lens + sequence) - num_new
    first_position = num_cached + first_token
    last = num_cached + tl.minimum(first_token + BLOCK_Q, num_new)
    position = num_cached + tl.minimum(token, num_new - 1)

    token_row = (start + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    query_row = token_row * stride_query_token + head * stride_query_head
    q = _load_rows(query + query_row[:, None] + d[None, :], is_row, HEAD_DIM, BLOCK_D, True)
    rest = None
    if REST_DIM > 0:
        columns = HEAD_DIM + tl.arange(0, BLOCK_R)
        rest = _load_rows(query + query_row[:, None] + columns[None, :], is_row, REST_DIM, BLOCK_R, True)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, mask=is_row, other=0.0).to(tl.float32)
    key_scales = None
    value_scales = None
    if kv_scales is not None:
        key_scales = kv_scales + kv_head * stride_scale_head
        value_scales = key_scales + stride_scale_value
    table = block_tables + sequence.to(tl.int64) * stride_table
    keys = kv + kv_head.to(tl.int64) * stride_head
    values = keys + STRIDE_VALUE

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # first ──── masked_first ──── last
    #   seen by all rows │ the diagonal (with a window, every key is masked)
    if window is None:
        lowest = 0
        first = 0
        masked_first = (first_position + 1) // BLOCK_N * BLOCK_N
        peak, total, accumulator = _attend(
            q, rest, peak, total, accumulator, first, masked_first, lowest, position, slopes, table, keys,
            values, key_scales, value_scales, scale, window, softcap, BLOCK_SIZE, HEAD_DIM, REST_DIM, BLOCK_N,
            BLOCK_D, BLOCK_R, STRIDE_BLOCK, STRIDE_SLOT, STRIDE_SCALE_BLOCK, KV_FORMAT, IS_CHUNKED,
            MASKED=False,
        )  # fmt: skip
    else:
        lowest = _first_seen(first_position, window, IS_CHUNKED)
        masked_first = lowest // BLOCK_N * BLOCK_N
    peak, total, accumulator = _attend(
        q, rest, peak, total, accumulator, masked_first, last, lowest, position, slopes, table, keys, values,
        key_scales, value_scales, scale, window, softcap, BLOCK_SIZE, HEAD_DIM, REST_DIM, BLOCK_N, BLOCK_D,
        BLOCK_R, STRIDE_BLOCK, STRIDE_SLOT, STRIDE_SCALE_BLOCK, KV_FORMAT, IS_CHUNKED, MASKED=True,
    )  # fmt: skip

    head_sinks = None
    if sinks is not None:
        head_sinks = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
    accumulator = _normalize(peak, total, accumulator, head_sinks)
    rows = token_row * stride_output_token + head * stride_output_head
    tl.store(
        output + rows[:, None] + d[None, :],
        accumulator.to(output.dtype.element_ty),
        mask=is_row[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit
def _cut(
    length,
    window,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Return (lowest key that the last token sees, start of its splits, tokens per split, splits)."""
    lowest = 0
    if window is not None:
        lowest = _first_seen(length - 1, window, IS_CHUNKED)
    first = lowest // BLOCK_N * BLOCK_N
    split_tokens = tl.cdiv(tl.cdiv(length - first, MAX_SPLITS), SPLIT_TOKENS) * SPLIT_TOKENS
    return lowest, first, split_tokens, tl.cdiv(length - first, split_tokens)


@triton.jit(do_not_specialize=["num_slots", "stride_table"])
def decode_kernel(
    output,
    partial_outputs,
    partial_sums,
    query,
    kv,
    kv_scales,
    block_tables,
    query_starts,
    seq_lens,
    sinks,
    alibi_slopes,
    scale,
    window,
    softcap,
    num_slots,
    stride_output_token,
    stride_output_head,
    stride_query_token,
    stride_query_head,
    stride_head,
    stride_scale_value,
    stride_scale_head,
    stride_table,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_VALUE: tl.constexpr,
    STRIDE_SLOT: tl.constexpr,
    STRIDE_SCALE_BLOCK: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Compute attention for the single new token of each sequence, over its splits.

    The grid is (workers, KV heads * parts of a group, sequences). If a token has only one split, its result
    is final. If there are several splits, each one stores its sum in ``partial_outputs`` ``[num_seqs,
    num_heads, num_slots, BLOCK_D]``, and its row max and row sum in ``partial_sums`` ``[num_seqs, num_heads,
    num_slots, 2]``.
    """
    # If more than BLOCK_M query heads share a KV head, several programs compute them. They read the KV head
    # through the same cache.
    PARTS: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(1) // PARTS
    sequence = tl.program_id(2)
    token = tl.load(query_starts + sequence)
    length = tl.load(seq_lens + sequence)
    if (tl.load(query_starts + sequence + 1) - token != 1) | (length <= 0):
        return
    lowest, first, split_tokens, num_splits = _cut(
        length, window, SPLIT_TOKENS, MAX_SPLITS, BLOCK_N, IS_CHUNKED
    )
    if tl.program_id(0) >= num_splits:
        return

    row = tl.program_id(1) % PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < GROUP
    head = kv_head * GROUP + row
    position = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    query += token.to(tl.int64) * stride_query_token
    d = tl.arange(0, BLOCK_D)
    query_row = head * stride_query_head
    q = _load_rows(query + query_row[:, None] + d[None, :], is_row, HEAD_DIM, BLOCK_D, True)
    rest = None
    if REST_DIM > 0:
        columns = HEAD_DIM + tl.arange(0, BLOCK_R)
        rest = _load_rows(query + query_row[:, None] + columns[None, :], is_row, REST_DIM, BLOCK_R, True)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + head, mask=is_row, other=0.0).to(tl.float32)
    head_sinks = None
    if sinks is not None:
        head_sinks = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
    key_scales = None
    value_scales = None
    if kv_scales is not None:
        key_scales = kv_scales + kv_head * stride_scale_head
        value_scales = key_scales + stride_scale_value
    table = block_tables + sequence.to(tl.int64) * stride_table
    keys = kv + kv_head.to(tl.int64) * stride_head
    values = keys + STRIDE_VALUE
    num_heads = tl.num_programs(1) // PARTS * GROUP
    slot_of_head = (sequence.to(tl.int64) * num_heads + head) * num_slots

    for split in range(tl.program_id(0), num_splits, tl.num_programs(0)):
        split_first = first + split * split_tokens
        peak, total, accumulator = _attend(
            q,
            rest,
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
            split_first, tl.minimum(split_first + split_tokens, length), lowest, position, slopes, table,
            keys, values, key_scales, value_scales, scale, window, softcap, BLOCK_SIZE, HEAD_DIM, REST_DIM,
            BLOCK_N, BLOCK_D, BLOCK_R, STRIDE_BLOCK, STRIDE_SLOT, STRIDE_SCALE_BLOCK, KV_FORMAT, IS_CHUNKED,
            MASKED=True,
        )  # fmt: skip
        if num_splits == 1:
            accumulator = _normalize(peak, total, accumulator, head_sinks)
            rows = token.to(tl.int64) * stride_output_token + head * stride_output_head
            tl.store(
                output + rows[:, None] + d[None, :],
                accumulator.to(output.dtype.element_ty),
                mask=is_row[:, None] & (d < HEAD_DIM)[None, :],
            )
        else:
            slot = slot_of_head + split
            tl.store(partial_sums + slot * 2, peak, mask=is_row)
            tl.store(partial_sums + slot * 2 + 1, total, mask=is_row)
            tl.store(
                partial_outputs + slot[:, None] * BLOCK_D + d[None, :], accumulator, mask=is_row[:, None]
            )


@triton.jit(do_not_specialize=["num_slots"])
def combine_kernel(
    output,
    partial_outputs,
    partial_sums,
    query_starts,
    seq_lens,
    sinks,
    window,
    num_slots,
    stride_output_token,
    stride_output_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Merge the splits of each token that has several. The grid is (heads, sequences)."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    token = tl.load(query_starts + sequence)
    length = tl.load(seq_lens + sequence)
    if (tl.load(query_starts + sequence + 1) - token != 1) | (length <= 0):
        return
    _, _, _, num_splits = _cut(length, window, SPLIT_TOKENS, MAX_SPLITS, BLOCK_N, IS_CHUNKED)
    if num_splits == 1:
        return

    d = tl.arange(0, BLOCK_D)
    slot_of_head = (sequence.to(tl.int64) * tl.num_programs(0) + head) * num_slots
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    merged = tl.zeros([1, BLOCK_D], tl.float32)
    for start in range(0, num_splits, SPLITS_AT_ONCE):
        split = start + tl.arange(0, SPLITS_AT_ONCE)
        is_split = split < num_splits
        slot = slot_of_head + split
        peaks = tl.load(partial_sums + slot * 2, mask=is_split, other=float("-inf"))
        totals = tl.load(partial_sums + slot * 2 + 1, mask=is_split, other=0.0)
        outputs = tl.load(
            partial_outputs + slot[:, None] * BLOCK_D + d[None, :], mask=is_split[:, None], other=0.0
        )
        # Every split has a key that its token sees, so no row max is -inf.
        new_peak = tl.maximum(peak, tl.max(peaks, axis=0))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(peaks - new_peak)
        total = total * decay + tl.sum(totals * weights, axis=0)
        merged = merged * decay[:, None] + tl.sum(outputs * weights[:, None], axis=0)[None, :]
        peak = new_peak

    head_sinks = None
    if sinks is not None:
        head_sinks = tl.load(sinks + head + tl.arange(0, 1)).to(tl.float32)
    merged = _normalize(peak, total, merged, head_sinks)
    row = output + token.to(tl.int64) * stride_output_token + head * stride_output_head
    tl.store(row + d[None, :], merged.to(output.dtype.element_ty), mask=(d < HEAD_DIM)[None, :])
