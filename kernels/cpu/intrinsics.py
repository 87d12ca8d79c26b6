"""What Numba lacks for these kernels, written as LLVM instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_FLOAT = ir.FloatType()
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)

FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered; infinities and NaNs keep their meaning."""

TILE_ROWS = 4
TILE_COLUMNS = 64 if binding.get_host_cpu_features().get("avx512f", False) else 16
"""Sums that ``add_product`` keeps in registers: 4 x 64 are 16 registers of AVX-512, 4 x 16 are 8 of AVX2."""


def _instruction(emit: Callable[..., Any]) -> Callable[..., Any]:
    instruction: Callable[..., Any] = intrinsic(prefer_literal=True)(emit)
    return instruction


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a part of a kernel, inlined so that its constant arguments unroll its loops."""
    part: Callable[..., Any] = njit(fastmath=FAST_MATH, inline="always")(function)
    return part


@_instruction
def pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    """Return an address as a pointer to a NumPy type."""
    signature = types.CPointer(dtype.dtype)(types.int64, dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, codegen


@_instruction
def fetch_and_increment(typingctx: Any, address: Any) -> Any:
    """Take the next number from a counter that threads share."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _INT64.as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(_INT64, 1), "monotonic")

    return types.int64(types.int64), codegen


@_instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """Begin to read a cache line."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte_pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _INT32, _INT32, _INT32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        for_reading, keep_in_all_caches, is_data = (ir.Constant(_INT32, value) for value in (0, 3, 1))
        line = builder.inttoptr(arguments[0], byte_pointer)
        builder.call(function, [line, for_reading, keep_in_all_caches, is_data])
        return context.get_dummy_value()

    return types.none(types.int64), codegen


@_instruction
def widen(typingctx: Any, stored: Any) -> Any:
    """Convert a stored value to float32.

    Stored are float32, bfloat16 bits as uint16, float16 bits as int16, int8, or e4m3 bits as uint8.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (value,) = arguments
        if stored == types.uint16:
            high_half = builder.shl(builder.zext(value, _INT32), ir.Constant(_INT32, 16))
            return builder.bitcast(high_half, _FLOAT)
        if stored == types.int16:
            return builder.fpext(builder.bitcast(value, ir.HalfType()), _FLOAT)
        if stored == types.int8:
            return builder.sitofp(value, _FLOAT)
        if stored == types.uint8:
            # Placed in a float16 the bits mean 2^-8 of the value.
            wide = builder.zext(value, _INT16)
            sign = builder.shl(builder.and_(wide, ir.Constant(_INT16, 0x80)), ir.Constant(_INT16, 8))
            rest = builder.shl(builder.and_(wide, ir.Constant(_INT16, 0x7F)), ir.Constant(_INT16, 7))
            half = builder.fpext(builder.bitcast(builder.or_(sign, rest), ir.HalfType()), _FLOAT)
            return builder.fmul(half, ir.Constant(_FLOAT, 256.0))
        return value

    return types.float32(stored), codegen


@_instruction
def _float_from_bits(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _FLOAT)

    return types.float32(types.int32), codegen


@_instruction
def bits_of_float(typingctx: Any, value: Any) -> Any:
    """Return the bits of a float32 as int32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _INT32)

    return types.int32(types.float32), codegen


@compiled
def exp(x: np.float32) -> np.float32:
    """Return e**x for x <= 0 within 2 units in the last place; it vectorises, which libm's does not.

    2**n * 2**f with n an integer put into the exponent bits and a polynomial for f in [-1/2, 1/2] (the
    coefficients of Cephes' ``exp2f``). What is below the smallest normal number becomes it.
    """
    y = max(x, np.float32(-87.0)) * np.float32(1.4426950408889634)
    n = np.floor(y + np.float32(0.5))
    f = y - n
    p = np.float32(1.535336188319500e-4)
    p = p * f + np.float32(1.339887440266574e-3)
    p = p * f + np.float32(9.618437357674640e-3)
    p = p * f + np.float32(5.550332471162809e-2)
    p = p * f + np.float32(2.402264791363012e-1)
    p = p * f + np.float32(6.931472028550421e-1)
    p = p * f + np.float32(1.0)
    power: np.float32 = p * _float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return power


@_instruction
def add_product(
    typingctx: Any, total: Any, left: Any, right: Any, depth: Any, strides: Any, width: Any
) -> Any:
    """Add a product of float32 matrices to ``total[TILE_ROWS, width]``, all sums in registers.

    ``total[r, c] += sum over k < depth of left[r, k] * right[k, c]``: the inner loop of a matrix product
    (Goto and van de Geijn, 2008). LLVM does not find this form in plain loops.

    Args:
        total, left, right: addresses.
        depth: number of products of a sum.
        strides: elements from row to row of total, left and right.
        width: columns, a literal.
    """
    if not isinstance(width, types.IntegerLiteral):
        return None
    columns = width.literal_value
    vector = ir.VectorType(_FLOAT, columns)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses = [builder.inttoptr(address, _FLOAT.as_pointer()) for address in arguments[:3]]
        total_at, left_at, right_at = addresses
        depth_value = arguments[3]
        total_stride, left_stride, right_stride = cgutils.unpack_tuple(builder, arguments[4])

        def row_pointer(base: Any, stride: Any, row: int) -> Any:
            return builder.gep(base, [builder.mul(stride, ir.Constant(_INT64, row))])

        totals = [
            builder.bitcast(row_pointer(total_at, total_stride, row), vector.as_pointer())
            for row in range(TILE_ROWS)
        ]
        lefts = [row_pointer(left_at, left_stride, row) for row in range(TILE_ROWS)]
        before = builder.block
        loop, after = builder.append_basic_block("product"), builder.append_basic_block("sums")
        starts = [builder.load(each, align=4) for each in totals]
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_INT64)
        sums = [builder.phi(vector) for _ in range(TILE_ROWS)]
        right_row = builder.gep(right_at, [builder.mul(k, right_stride)])
        right_values = builder.load(builder.bitcast(right_row, vector.as_pointer()), align=4)
        undefined, lanes = ir.Constant(vector, ir.Undefined), ir.VectorType(_INT32, columns)
        results = []
        for row in range(TILE_ROWS):
            scalar = builder.load(builder.gep(lefts[row], [k]), align=4)
            single = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
            splat = builder.shuffle_vector(single, undefined, ir.Constant(lanes, None))
            product = builder.fmul(splat, right_values, flags=("contract",))
            results.append(builder.fadd(sums[row], product, flags=("contract",)))
        next_k = builder.add(k, ir.Constant(_INT64, 1))
        builder.cbranch(builder.icmp_signed("<", next_k, depth_value), loop, after)
        k.add_incoming(ir.Constant(_INT64, 0), before)
        k.add_incoming(next_k, loop)
        for row in range(TILE_ROWS):
            sums[row].add_incoming(starts[row], before)
            sums[row].add_incoming(results[row], loop)
        builder.position_at_end(after)
        for row in range(TILE_ROWS):
            builder.store(results[row], totals[row], align=4)
        return context.get_dummy_value()

    signature = types.none(types.int64, types.int64, types.int64, types.int64, strides, width)
    return signature, codegen
