"""The running softmax of attention with rows in the lanes of vectors, in LLVM IR.

The rows' max, sum and bounds stay in registers while it runs over the keys, which LLVM does not do for loops
over arrays.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.kernels.cpu.attention_program import LOWEST
from quire.kernels.cpu.intrinsics import Values, emit_loop, fused, instruction, splat

LANES = 16
"""Rows that one vector has."""
_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTEGERS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT32, LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_FLOATS, [value] * LANES)


def _integers(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * LANES)


def _load(builder: Any, address: Any, kind: Any = _FLOATS) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def _exp(builder: Any, x: Any) -> Any:
    """Emit ``intrinsics.exp``, with the same bits."""
    # A NaN stays one.
    least = _floats(-87.0)
    y = builder.fmul(
        builder.select(builder.fcmp_ordered("<", x, least), least, x), _floats(1.4426950408889634)
    )
    floor = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, [_FLOATS]), f"llvm.floor.v{LANES}f32"
    )
    n = builder.call(floor, [builder.fadd(y, _floats(0.5))])
    f, p = builder.fsub(y, n), _floats(1.535336188319500e-4)
    for coefficient in (
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    ):
        p = fused(builder, p, f, _floats(coefficient))
    exponent = builder.add(builder.fptosi(n, _INTEGERS), _integers(127))
    return builder.fmul(p, builder.bitcast(builder.shl(exponent, _integers(23)), _FLOATS))


def _round(builder: Any, value: Any) -> Any:
    """Emit the bits of the nearest bfloat16, as those of a float32; a NaN stays one."""
    bits = builder.bitcast(value, _INTEGERS)
    last_kept_bit = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded = builder.add(bits, builder.add(last_kept_bit, _integers(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, _integers(0x7FC00000), rounded)
    return builder.and_(rounded, _integers(-0x10000))


@instruction
def weigh_keys(
    typingctx: Any, scores: Any, weights: Any, rows: Any, bounds: Any, num_keys: Any, strides: Any, scale: Any
) -> Any:
    """Write the softmax weights of an even number of keys for 16 rows, and scale what they have summed up.

    Weights are rounded to bfloat16, and the sum has the rounded ones. Those of keys that a row does not see
    are zero.

    Args:
        scores, weights: addresses of float32 scores, and of pairs of weights in bfloat16.
        rows: addresses of the rows' max, sum, and ALiBi slope, in float32.
        bounds: addresses of the rows' int32 bounds: they see keys from the first one on, before the second;
            then come the distances from their positions to that of the first key.
        strides: bytes from the scores of one key to the next, and from the weights of a pair to the next.
        scale: factor of the scores.

    Returns:
        Whether the max of a row has grown. The factors of the earlier sums then replace the slopes.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores_at, weights_at, row_addresses, bound_addresses, count, stride_values, factor = arguments
        best_at, sum_at, slope_at = cgutils.unpack_tuple(builder, row_addresses)
        bound_values = cgutils.unpack_tuple(builder, bound_addresses)
        low, high, distance = (_load(builder, each, _INTEGERS) for each in bound_values)
        score_stride, weight_stride = cgutils.unpack_tuple(builder, stride_values)
        best, slope, factors = (
            _load(builder, best_at),
            _load(builder, slope_at),
            splat(builder, factor, LANES),
        )

        def moved(base: Any, stride: Any, index: Any) -> Any:
            return builder.add(base, builder.mul(stride, index))

        def limit(key: Any, seen: Any, otherwise: Any) -> Any:
            keys = splat(builder, builder.trunc(key, _INT32), LANES)
            is_seen = builder.and_(builder.icmp_signed("<=", low, keys), builder.icmp_signed("<", keys, high))
            return builder.select(is_seen, seen, otherwise)

        def find_peak(key: Any, values: Values) -> Values:
            at = moved(scores_at, score_stride, key)
            keys = splat(builder, builder.trunc(key, _INT32), LANES)
            bias = builder.fmul(slope, builder.sitofp(builder.add(distance, keys), _FLOATS))
            score = builder.fadd(builder.fmul(_load(builder, at), factors), bias)
            score = limit(key, score, _floats(float(LOWEST)))
            _store(builder, score, at)
            return {"peak": _larger(builder, score, values["peak"])}

        peak = emit_loop(builder, count, {"peak": best}, find_peak)["peak"]
        shrink = _exp(builder, builder.fsub(best, peak))
        total = builder.fmul(_load(builder, sum_at), shrink)

        def weigh(pair: Any, values: Values) -> Values:
            total, rounded = values["total"], []
            for second in (0, 1):
                key = builder.add(builder.shl(pair, ir.Constant(_INT64, 1)), ir.Constant(_INT64, second))
                score = _load(builder, moved(scores_at, score_stride, key))
                # ``_exp`` never returns zero, but keys that a row does not see must add exactly nothing.
                weight = limit(key, _exp(builder, builder.fsub(score, peak)), _floats(0.0))
                rounded.append(_round(builder, weight))
                total = builder.fadd(total, builder.bitcast(rounded[-1], _FLOATS))
            both = builder.or_(builder.lshr(rounded[0], _integers(16)), rounded[1])
            _store(builder, both, moved(weights_at, weight_stride, pair))
            return {"total": total}

        total = emit_loop(builder, builder.lshr(count, ir.Constant(_INT64, 1)), {"total": total}, weigh)[
            "total"
        ]
        for value, address in ((peak, best_at), (total, sum_at), (shrink, slope_at)):
            _store(builder, value, address)
        grown = builder.fcmp_ordered(">", peak, best)
        return builder.icmp_unsigned(
            "!=", builder.bitcast(grown, ir.IntType(LANES)), ir.Constant(ir.IntType(LANES), 0)
        )

    return types.boolean(types.int64, types.int64, rows, bounds, types.int64, strides, types.float32), codegen


@instruction
def scale_columns(typingctx: Any, total: Any, factors: Any, num_rows: Any, stride: Any) -> Any:
    """Multiply 16 columns of float32 at an address by factors at another one; ``stride`` is in bytes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total_at, factors_at, count, row_bytes = arguments
        by = _load(builder, factors_at)

        def scale(row: Any, _: Values) -> Values:
            at = builder.add(total_at, builder.mul(row, row_bytes))
            _store(builder, builder.fmul(_load(builder, at), by), at)
            return {}

        emit_loop(builder, count, {}, scale)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4), codegen
