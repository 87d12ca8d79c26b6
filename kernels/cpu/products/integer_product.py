"""Products of 8-bit integers: weights with a scale for each column, inputs with a scale for each row.

The sums over integers are exact, so their bits depend neither on the order nor on the instruction, and all
processors compute the same. Inputs are stored with 128 added, since ``vpdpbusd`` multiplies unsigned by
signed integers. From each sum, 128 times the sum of the column's weights is subtracted.

``vpmaddwd`` multiplies integers of 16 bits: the even weights of each four by the even inputs, and then the
odd ones. Its inputs are stored in this order, since a vector that repeats a word of memory costs nothing.

    panel   [in_features / 4, TILE_COLUMNS, 4] int8, then the columns' float32 scales and int32 sums
    row     a float32 scale, ``ROW_HEADER`` bytes in all, then [in_features] uint8; for ``vpmaddwd``, for each
            four inputs the even two and the odd two, as uint16
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import (
    TILE_COLUMNS,
    exact,
    float_from_bits,
    pointer,
    processor_features,
    splat,
)

INTEGERS: Any = np.int32
"""NumPy type that stands for these weights in Numba."""
INPUTS = 4
"""Inputs that one instruction multiplies in each column."""
PANEL_TRAILER = 8 * TILE_COLUMNS
"""Bytes of a panel's scales and sums."""
ROW_HEADER = 16
"""Bytes before a row's integers."""
LEAST_PEAK = 1e-30
"""Rows of smaller values count as zeros, since the inverse of their scale would overflow."""
MOST_INPUTS = 1 << 16
"""Most inputs of a layer: the sum of so many products of 255 and 127 fits 32 bits."""

_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)

Instruction = Literal["vpdpbusd", "vpmaddwd", "vpmulld"]


def integer_instruction(features: Mapping[str, bool]) -> tuple[Instruction, int]:
    """Return how a processor multiplies integers, by LLVM's names of its features, and in how many lanes."""
    if features.get("avx512vnni"):
        return "vpdpbusd", 16
    if features.get("avxvnni"):
        return "vpdpbusd", 8
    if features.get("avx512bw"):
        return "vpmaddwd", 16
    return ("vpmaddwd", 8) if features.get("avx2") else ("vpmulld", 8)


INTEGER_INSTRUCTION, INTEGER_LANES = integer_instruction(processor_features())
"""How kernels of this process multiply integers."""
INPUT_BYTES = 2 if INTEGER_INSTRUCTION == "vpmaddwd" and not processor_features().get("amx-int8") else 1
"""Bytes of an integer of a row; tiles read single bytes."""


def emit_integer_products(
    builder: Any, inputs: Sequence[Any], weights: Any, sums: Any, instruction: Instruction
) -> Any:
    """Emit ``sums + inputs * weights`` over the ``INPUTS`` bytes of each lane.

    Args:
        inputs: the int32 that hold ``INPUTS`` inputs of a row.
        weights, sums: vectors of int32; weights are ``INPUTS`` signed bytes in each lane.
    """
    vector, lanes = weights.type, weights.type.count

    def repeated(value: Any) -> Any:
        return splat(builder, value, lanes)

    if instruction == "vpdpbusd":
        function_type = ir.FunctionType(vector, [vector] * 3)
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.call(function, [sums, repeated(inputs[0]), weights])
    if instruction == "vpmaddwd":
        return _emit_halves(builder, inputs, weights, sums)
    return emit_single_bytes(builder, repeated(inputs[0]), weights, sums)


def emit_single_bytes(builder: Any, unsigned: Any, signed: Any, sums: Any) -> Any:
    """Emit ``sums + unsigned * signed`` over the bytes of each lane, by instructions for 32 bits."""

    def constant(number: int) -> Any:
        return ir.Constant(sums.type, [number] * sums.type.count)

    for byte in range(INPUTS):
        left = builder.and_(builder.lshr(unsigned, constant(8 * byte)), constant(255))
        right = builder.ashr(builder.shl(signed, constant(24 - 8 * byte)), constant(24))
        sums = builder.add(sums, builder.mul(left, right))
    return sums


def _emit_halves(builder: Any, inputs: Sequence[Any], weights: Any, sums: Any) -> Any:
    """Emit the products of the even and of the odd bytes, as integers of 16 bits, which cannot saturate."""
    vector, lanes = weights.type, weights.type.count
    halves = ir.VectorType(_INT16, 2 * lanes)
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [halves] * 2), name)
    eight = ir.Constant(halves, [8] * 2 * lanes)
    words = builder.bitcast(weights, halves)
    even = builder.ashr(builder.shl(words, eight), eight)
    odd = builder.ashr(words, eight)
    if len(inputs) == 1:
        mask = ir.Constant(_INT32, 0x00FF00FF)
        inputs = [builder.and_(builder.lshr(inputs[0], ir.Constant(_INT32, byte)), mask) for byte in (0, 8)]
    for half, word in zip((even, odd), inputs, strict=True):
        repeated = builder.bitcast(splat(builder, word, lanes), halves)
        sums = builder.add(sums, builder.call(function, [repeated, half]))
    return sums


@exact
def scale_and_inverse(source: int, length: int) -> tuple[np.float32, np.float32]:
    """Return the scale of the float32 at an address, and its inverse; 0 if all their integers are zeros.

    A value that is not finite makes the scale NaN.
    """
    bits = carray(pointer(source, np.int32), (length,))
    # Positive floats have the order of their bits, and integers have a maximum that LLVM computes in vectors.
    peak_bits = np.int32(0)
    for index in range(length):
        peak_bits = max(peak_bits, np.int32(bits[index] & np.int32(0x7FFFFFFF)))
    peak = float_from_bits(peak_bits)
    if peak_bits >= 0x7F800000:
        return np.float32(np.nan), np.float32(0.0)
    if peak < np.float32(LEAST_PEAK):
        return np.float32(0.0), np.float32(0.0)
    return peak / np.float32(127.0), np.float32(127.0) / peak


@exact
def encode_integers(source: int, target: int, length: int) -> None:
    """Quantize a row of float32; a value that is not finite makes its scale NaN. Both are addresses."""
    values = carray(pointer(source, np.float32), (length,))
    scales = carray(pointer(target, np.float32), (1,))
    octets = carray(pointer(target + ROW_HEADER, np.uint8), (length,))
    words = carray(pointer(target + ROW_HEADER, np.uint16), (length,))
    scales[0], inverse = scale_and_inverse(source, length)
    if INPUT_BYTES == 1:
        for index in range(length):
            octets[index] = np.uint8(_integer(values[index], inverse))
    else:
        for first in range(0, length, INPUTS):
            for place in range(INPUTS):
                number = place % 2 * 2 + place // 2
                words[first + place] = np.uint16(_integer(values[first + number], inverse))


@exact
def _integer(value: np.float32, inverse: np.float32) -> np.int32:
    """Return the integer of an input, with 128 added; ``inverse`` is 0 if the row's integers are zeros."""
    # A value that is not finite has no integer.
    scaled = value * inverse if inverse != 0.0 else np.float32(0.0)
    return np.int32(np.rint(scaled)) + np.int32(128)


@exact
def scale_sums(
    inputs: int, input_stride: int, panel_end: int, output: int, output_stride: int, num_rows: int
) -> None:
    """Replace the int32 sums of rows and of a panel's columns by float32 products; all are addresses.

    Args:
        panel_end: address of the panel's scales.
        output_stride: elements from one row of sums to the next.
    """
    columns = carray(pointer(panel_end, np.float32), (TILE_COLUMNS,))
    weight_sums = carray(pointer(panel_end + 4 * TILE_COLUMNS, np.int32), (TILE_COLUMNS,))
    for row in range(num_rows):
        scale = carray(pointer(inputs + row * input_stride, np.float32), (1,))[0]
        sums = carray(pointer(output + 4 * row * output_stride, np.int32), (TILE_COLUMNS,))
        products = carray(pointer(output + 4 * row * output_stride, np.float32), (TILE_COLUMNS,))
        for column in range(TILE_COLUMNS):
            total = np.int32(sums[column] - np.int32(128) * weight_sums[column])
            products[column] = np.float32(total) * (scale * columns[column])
