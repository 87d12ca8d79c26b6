"""Products of weights of 4 bits with inputs of 8 bits; both have a scale for each group of inputs.

The weights are those of ``quantized_weight``. In each word of 32 bits, the lower halves of the bytes are
inputs 0 to 3, and the upper halves inputs 4 to 7. With 8 added to each weight, ``vpdpbusd`` multiplies four
of these unsigned by four signed inputs. A group's sum over integers begins with minus 8 times the sum of its
inputs and is therefore exact, so all processors compute the same. It is multiplied by both scales and added
to the sum of the groups before it.

    row     for each group: [GROUP] int8, then their float32 scale and minus 8 times their sum as int32
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import GROUP, exact, pointer, splat
from quire.kernels.cpu.products.integer_product import Instruction, emit_single_bytes, scale_and_inverse

NIBBLES: Any = np.float64
"""NumPy type that stands for these weights in Numba."""
OFFSET = 8
"""What makes a weight unsigned."""
OPERAND_BYTES = GROUP + 8
"""Bytes of a group of inputs."""
SCALE_WORD, CORRECTION_WORD = GROUP // 4, GROUP // 4 + 1
"""Places of a group's scale and correction, in words of 32 bits."""
SCALE_FACTOR = float(1 << 28)
"""Factor of the scales of inputs, whose inverse the scales of weights have, see ``packed_product``."""

_BYTE = ir.IntType(8)
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)


def emit_nibbles(builder: Any, words: Any, half: int) -> Any:
    """Emit the unsigned weights of the lower halves (0) or upper halves (1) of bytes, from int32 vectors."""

    def constant(number: int) -> Any:
        return ir.Constant(words.type, [number] * words.type.count)

    shifted = builder.lshr(words, constant(4)) if half else words
    return builder.xor(builder.and_(shifted, constant(0x0F0F0F0F)), constant(0x08080808))


def emit_start(builder: Any, correction: Any, instruction: Instruction, lanes: int) -> Any:
    """Emit the vector from which the sums of a group begin."""
    if instruction == "vpmaddwd":
        return ir.Constant(ir.VectorType(_INT16, 2 * lanes), [0] * 2 * lanes)
    return splat(builder, correction, lanes)


def emit_nibble_products(builder: Any, inputs: Any, weights: Any, sums: Any, instruction: Instruction) -> Any:
    """Emit ``sums + inputs * weights`` over the four bytes of each lane.

    Args:
        inputs: int32, four signed bytes.
        weights: a vector of int32, each of four bytes from 0 to 15.
        sums: the vector of ``emit_start``, or a result of this function.
    """
    lanes = weights.type.count
    repeated = splat(builder, inputs, lanes)
    if instruction == "vpdpbusd":
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        return _call(builder, name, sums.type, [sums, weights, repeated])
    if instruction == "vpmaddwd":
        # A sum of 16 bits has at most the magnitude 32 * 15 * 127, so it cannot overflow.
        name = "llvm.x86.avx512.pmaddubs.w.512" if lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
        byte_vector = ir.VectorType(_BYTE, 4 * lanes)
        both = [builder.bitcast(each, byte_vector) for each in (weights, repeated)]
        return builder.add(sums, _call(builder, name, sums.type, both))
    return emit_single_bytes(builder, weights, repeated, sums)


def emit_end(builder: Any, sums: Any, correction: Any, instruction: Instruction, lanes: int) -> Any:
    """Emit the exact sums of a group, as int32."""
    if instruction != "vpmaddwd":
        return sums
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    ones = ir.Constant(sums.type, [1] * sums.type.count)
    pairs = _call(builder, name, ir.VectorType(_INT32, lanes), [sums, ones])
    return builder.add(pairs, splat(builder, correction, lanes))


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


@exact
def encode_groups(source: int, target: int, length: int) -> None:
    """Quantize a row of float32; a value that is not finite makes the scale of its group NaN.

    Both are addresses.
    """
    for group in range(length // GROUP):
        first, at = source + 4 * GROUP * group, target + OPERAND_BYTES * group
        values = carray(pointer(first, np.float32), (GROUP,))
        integers = carray(pointer(at, np.int8), (GROUP,))
        scales = carray(pointer(at, np.float32), (SCALE_WORD + 1,))
        corrections = carray(pointer(at, np.int32), (CORRECTION_WORD + 1,))
        scale, inverse = scale_and_inverse(first, GROUP)
        scales[SCALE_WORD] = scale * np.float32(SCALE_FACTOR)
        total = np.int32(0)
        if inverse == 0.0:
            for index in range(GROUP):
                integers[index] = 0
        else:
            for index in range(GROUP):
                integer = np.int32(np.rint(values[index] * inverse))
                integers[index] = np.int8(integer)
                total += integer
        corrections[CORRECTION_WORD] = -OFFSET * total
