"""Loops over many floats whose results do not depend on the width of the processor's vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import Values, emit_loop, fused, instruction, splat

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
SUM_LANES = 16
"""Sums that ``sum_powers`` and ``add_lanes`` compute side by side."""


@instruction
def sum_powers(typingctx: Any, values: Any, length: Any, shift: Any, power: Any) -> Any:
    """Return the sum of ``(values[i] - shift) ** power``; its order does not depend on the vector width.

    Each of 16 lanes sums every 16th value, with fused multiplications. The lanes are then added in pairs.

    Args:
        values: address of float32 values.
        length: number of values. The last ``length % 16`` values are added to the first lanes.
        shift: float32.
        power: 1 or 2, a literal.
    """
    if not isinstance(power, types.IntegerLiteral):
        return None
    is_squared = power.literal_value == 2

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, offset, _ = arguments
        vector = ir.VectorType(_FLOAT, SUM_LANES)
        base = builder.inttoptr(address, _FLOAT.as_pointer())
        offsets = splat(builder, offset, SUM_LANES)
        num_whole = builder.and_(count, ir.Constant(_INT64, -SUM_LANES))
        sums = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * SUM_LANES))

        def add(x: Any) -> None:
            difference = builder.fsub(x, offsets)
            total = builder.load(sums)
            if is_squared:
                builder.store(fused(builder, difference, difference, total), sums)
            else:
                builder.store(builder.fadd(total, difference), sums)

        with cgutils.for_range_slice(
            builder, ir.Constant(_INT64, 0), num_whole, ir.Constant(_INT64, SUM_LANES), _INT64
        ) as (index, _):
            whole = builder.bitcast(builder.gep(base, [index]), vector.as_pointer())
            add(builder.load(whole, align=4))
        with builder.if_then(builder.icmp_signed("<", num_whole, count)):
            # Lanes without a value get the shift, so that they add nothing.
            rest = cgutils.alloca_once_value(builder, offsets)
            lanes = builder.bitcast(rest, _FLOAT.as_pointer())
            with cgutils.for_range_slice(builder, num_whole, count, ir.Constant(_INT64, 1), _INT64) as (
                index,
                _,
            ):
                value = builder.load(builder.gep(base, [index]))
                builder.store(value, builder.gep(lanes, [builder.sub(index, num_whole)]))
            add(builder.load(rest))
        return fold(builder, builder.load(sums), builder.fadd)

    return types.float32(types.int64, types.int64, types.float32, power), codegen


@instruction
def add_lanes(typingctx: Any, lanes: Any, values: Any, length: Any, factor: Any) -> Any:
    """Multiply 16 sums by a factor, and add every 16th value to each of them.

    Args:
        lanes, values: addresses of float32.
        length: number of values, a multiple of 16.
        factor: float32.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(_FLOAT, SUM_LANES)
        sums_at, base = (builder.inttoptr(address, vector.as_pointer()) for address in arguments[:2])

        def add(index: Any, sums: Values) -> Values:
            return {0: builder.fadd(sums[0], builder.load(builder.gep(base, [index]), align=4))}

        start = builder.fmul(builder.load(sums_at, align=4), splat(builder, arguments[3], SUM_LANES))
        num_vectors = builder.udiv(arguments[2], ir.Constant(_INT64, SUM_LANES))
        builder.store(emit_loop(builder, num_vectors, {0: start}, add)[0], sums_at, align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.float32), codegen


@instruction
def largest(typingctx: Any, values: Any, length: Any, least: Any) -> Any:
    """Return the largest of some float32 values and ``least``; a NaN is left out.

    LLVM compares the values of a loop one after another, since a NaN makes the order matter.

    Args:
        values: address of the values.
        length: number of values, a multiple of 16.
        least: float32.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, least_value = arguments
        vector = ir.VectorType(_FLOAT, SUM_LANES)
        base = builder.inttoptr(address, vector.as_pointer())

        def larger(left: Any, right: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", left, right), left, right)

        def compare(index: Any, lanes: Values) -> Values:
            return {0: larger(builder.load(builder.gep(base, [index]), align=4), lanes[0])}

        num_vectors = builder.udiv(count, ir.Constant(_INT64, SUM_LANES))
        lanes = emit_loop(builder, num_vectors, {0: splat(builder, least_value, SUM_LANES)}, compare)
        return fold(builder, lanes[0], larger)

    return types.float32(types.int64, types.int64, types.float32), codegen


@instruction
def sum_range(typingctx: Any, keys: Any, weights: Any, length: Any, low: Any, high: Any) -> Any:
    """Return the number of keys from ``low`` to ``high``, and the sum of their weights as float64.

    Each of 32 lanes sums every 32nd weight. The lanes are then added in pairs, so that the order does not
    depend on the width of vectors.

    Args:
        keys, weights: addresses of int32 and of float32 values.
        length: number of values, a multiple of 32.
        low, high: int32.
    """
    num_parts = 2

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        keys_at, weights_at, count, first, last = arguments
        double = ir.VectorType(ir.DoubleType(), SUM_LANES)
        integers, floats = (ir.VectorType(kind, SUM_LANES) for kind in (_INT32, _FLOAT))
        key_base = builder.inttoptr(keys_at, _INT32.as_pointer())
        weight_base = builder.inttoptr(weights_at, _FLOAT.as_pointer())
        firsts, lasts = (splat(builder, bound, SUM_LANES) for bound in (first, last))
        no_weights = ir.Constant(floats, [0.0] * SUM_LANES)
        sums = [
            cgutils.alloca_once_value(builder, ir.Constant(double, [0.0] * SUM_LANES))
            for _ in range(num_parts)
        ]
        counts = cgutils.alloca_once_value(builder, ir.Constant(integers, [0] * SUM_LANES))
        step = ir.Constant(_INT64, num_parts * SUM_LANES)
        with cgutils.for_range_slice(builder, ir.Constant(_INT64, 0), count, step, _INT64) as (index, _):
            for part, total in enumerate(sums):
                at = builder.add(index, ir.Constant(_INT64, part * SUM_LANES))
                key_at = builder.bitcast(builder.gep(key_base, [at]), integers.as_pointer())
                weight_at = builder.bitcast(builder.gep(weight_base, [at]), floats.as_pointer())
                key = builder.load(key_at, align=4)
                is_in = builder.and_(
                    builder.icmp_signed(">=", key, firsts), builder.icmp_signed("<=", key, lasts)
                )
                kept = builder.select(is_in, builder.load(weight_at, align=4), no_weights)
                builder.store(builder.fadd(builder.load(total), builder.fpext(kept, double)), total)
                builder.store(builder.sub(builder.load(counts), builder.sext(is_in, integers)), counts)
        total = builder.fadd(builder.load(sums[0]), builder.load(sums[1]))
        number = fold(builder, builder.load(counts), builder.add)
        results = [builder.sext(number, _INT64), fold(builder, total, builder.fadd)]
        return context.make_tuple(builder, signature.return_type, results)

    result = types.Tuple((types.int64, types.float64))
    return result(types.int64, types.int64, types.int64, types.int32, types.int32), codegen


def fold(builder: Any, lanes: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Emit the sum of a vector's lanes, or what else ``add`` makes of two; they are added in pairs."""
    width = lanes.type.count
    while width > 1:
        width //= 2
        undefined = ir.Constant(lanes.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(lanes, undefined, ir.Constant(ir.VectorType(_INT32, width), list(half)))
            for half in (range(width), range(width, 2 * width))
        )
        lanes = add(low, high)
    return builder.extract_element(lanes, ir.Constant(_INT32, 0))
