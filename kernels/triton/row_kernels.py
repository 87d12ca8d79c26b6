"""The Triton kernels of what a model computes row by row: norms, gated activations and rotations.

Each rounds where the modules that it replaces round, since these store every intermediate result in the
model's dtype. A program computes whole rows, so that a token's result does not depend on other tokens.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def rms_norm_kernel(
    outputs,
    inputs,
    weight,
    epsilon,
    stride_row,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Normalize a row by its root mean square; the grid is (rows,).

    With ROUNDS_FIRST the row is rounded before it is multiplied by the weight, which is float32.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_known = column < LENGTH
    x = tl.load(inputs + row * stride_row + column, mask=is_known, other=0.0)
    values = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / LENGTH + epsilon)
    values *= factor
    if ROUNDS_FIRST:
        values = values.to(x.dtype).to(tl.float32)
    values *= tl.load(weight + column, mask=is_known, other=0.0)
    tl.store(outputs + row * LENGTH + column, values.to(x.dtype), mask=is_known)


@triton.jit
def gated_activation_kernel(outputs, gate_up, length, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``activation(gate) * up`` for rows ``[2 * length]`` of both; the grid is (rows, parts)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_known = column < length
    gate = tl.load(gate_up + row * (2 * length) + column, mask=is_known, other=0.0)
    up = tl.load(gate_up + row * (2 * length) + length + column, mask=is_known, other=0.0)
    x = gate.to(tl.float32)
    if KIND == "silu":
        activated = x / (1.0 + tl.exp2(-x * LOG2_E))
    else:
        # tanh(z) = 1 - 2 / (exp(2z) + 1), which is right at both infinities.
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        activated = 0.5 * x * (2.0 - 2.0 / (tl.exp2(inner * (2.0 * LOG2_E)) + 1.0))
    product = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(outputs + row * length + column, product.to(gate.dtype), mask=is_known)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def rotate_kernel(
    new_queries,
    new_keys,
    queries,
    keys,
    cosines,
    sines,
    num_heads,
    num_kv_heads,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Rotate heads of ``2 * HALF`` values, each value with the one HALF further on.

    The grid is (tokens, 2): the second index is 0 for the queries and 1 for the keys. The results
    ``[num_tokens, heads, 2 * HALF]`` are contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        inputs = queries + token * stride_query_token
        outputs = new_queries + token * num_heads * (2 * HALF)
        stride_head = stride_query_head
        count = num_heads
    else:
        inputs = keys + token * stride_key_token
        outputs = new_keys + token * num_kv_heads * (2 * HALF)
        stride_head = stride_key_head
        count = num_kv_heads
    column = tl.arange(0, BLOCK_D)
    is_column = column < HALF
    turn = token * (2 * HALF) + column
    cosine_low = tl.load(cosines + turn, mask=is_column, other=0.0).to(tl.float32)[None, :]
    cosine_high = tl.load(cosines + turn + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sine_low = tl.load(sines + turn, mask=is_column, other=0.0).to(tl.float32)[None, :]
    sine_high = tl.load(sines + turn + HALF, mask=is_column, other=0.0).to(tl.float32)[None, :]
    for first in range(0, count, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        is_known = (head < count)[:, None] & is_column[None, :]
        source = inputs + head[:, None] * stride_head + column[None, :]
        low = tl.load(source, mask=is_known, other=0.0)
        high = tl.load(source + HALF, mask=is_known, other=0.0)
        dtype = low.dtype
        new_low = _rounded(low.to(tl.float32) * cosine_low, dtype)
        new_low -= _rounded(high.to(tl.float32) * sine_low, dtype)
        new_high = _rounded(high.to(tl.float32) * cosine_high, dtype)
        new_high += _rounded(low.to(tl.float32) * sine_high, dtype)
        target = outputs + head[:, None] * (2 * HALF) + column[None, :]
        tl.store(target, new_low.to(dtype), mask=is_known)
        tl.store(target + HALF, new_high.to(dtype), mask=is_known)
