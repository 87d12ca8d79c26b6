"""Products of codes of 4, 6 or 8 bits with inputs of 8 bits; both have scales for groups of inputs.

A weight is its code, less a zero point, times the scale of its group, plus an offset of the group if the
coding has these. Codes are unsigned. In each word of 32 bits, codes of 4 bits have inputs 0 to 3 in the
lower halves of the bytes and inputs 4 to 7 in the upper halves; codes of 8 bits have 4 inputs. Codes of 6
bits have words of their lower 4 bits, and then words of their upper 2 bits, in which inputs 0 to 3 have the
lowest bits of the bytes, and inputs 12 to 15 the highest. ``vpdpbusd`` multiplies four of these unsigned by
four signed inputs. The sum over the inputs of a scale is exact, so all processors compute the same: it begins
with minus the zero point times the sum of the inputs. It is multiplied by both scales and added to the sum of
those before it. The offset times the sum and the scale of the group's inputs is added last.

    panel   for each group: words of codes, ``[words, TILE_COLUMNS]``; scales of 16 bits, ``[scales,
            TILE_COLUMNS]``; and offsets of 16 bits, ``[TILE_COLUMNS]``
    row     for each group: ``[GROUP]`` int8, their float32 scale, and int32 sums of both halves
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import (
    GROUP,
    TILE_COLUMNS,
    constant_of,
    exact,
    instruction,
    pointer,
    splat,
    widened,
)
from quire.kernels.cpu.products.integer_product import (
    Instruction,
    emit_single_bytes,
    scale_and_inverse,
)

NIBBLES, Q4, Q4_OFFSET, Q6_OFFSET, Q6_HALVES, Q8 = (
    np.dtype([(name, np.uint8)]) for name in ("w4a8", "q4", "q4_offset", "q6_offset", "q6_halves", "q8")
)
"""NumPy types that stand for these weights in Numba; ``NIBBLES`` are those of the weight dtype w4a8."""
OPERAND_BYTES = GROUP + 12
"""Bytes of a group of inputs."""
SCALE_WORD, SUM_WORD = GROUP // 4, GROUP // 4 + 1
"""Places of the inputs' scale and of their first sum, in words of 32 bits."""
SCALE_FACTOR = 256.0
"""Factor of the scales and offsets of weights, whose inverse the scales of inputs have.

With it, float16 scales up to 255 lose nothing, and small ones are not denormal.
"""
_BYTE = ir.IntType(8)
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_FLOAT = ir.FloatType()


class GroupCoding(NamedTuple):
    """What codes mean.

    Attributes:
        bits: 4, 6 or 8, the bits of a code.
        zero: the code of the weight 0.
        per_scale: inputs that share a scale, ``GROUP`` or half of it.
        has_offsets: whether groups have offsets.
        scale_type: the Numba type of the bits of scales and offsets: int16 for float16, uint16 for bfloat16.
    """

    bits: int
    zero: int
    per_scale: int = GROUP
    has_offsets: bool = False
    scale_type: Any = types.int16

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's codes in one panel."""
        return TILE_COLUMNS * GROUP * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of one panel."""
        return self.code_bytes + 2 * TILE_COLUMNS * (GROUP // self.per_scale + self.has_offsets)


GROUP_CODINGS: dict[Any, GroupCoding] = {
    from_dtype(NIBBLES): GroupCoding(4, 8, scale_type=types.uint16),
    from_dtype(Q4): GroupCoding(4, 8),
    from_dtype(Q4_OFFSET): GroupCoding(4, 0, has_offsets=True),
    from_dtype(Q6_OFFSET): GroupCoding(6, 0, has_offsets=True),
    from_dtype(Q6_HALVES): GroupCoding(6, 32, per_scale=GROUP // 2),
    from_dtype(Q8): GroupCoding(8, 128),
}
"""By the Numba type of the weights."""


is_in_groups = constant_of(types.boolean, lambda stored: stored in GROUP_CODINGS)
"""Whether weights have one of ``GROUP_CODINGS``, in a kernel."""


def emit_nibbles(builder: Any, words: Any, half: int) -> Any:
    """Emit the codes of the lower halves (0) or upper halves (1) of bytes, from int32 vectors."""

    def constant(number: int) -> Any:
        return ir.Constant(words.type, [number] * words.type.count)

    shifted = builder.lshr(words, constant(4)) if half else words
    return builder.and_(shifted, constant(0x0F0F0F0F))


def emit_upper_bits(builder: Any, words: Any, place: int) -> Any:
    """Emit the upper 2 bits of codes of 6 bits, from int32 vectors whose bytes have four of them."""
    distance = ir.Constant(words.type, [abs(4 - 2 * place)] * words.type.count)
    shifted = builder.shl(words, distance) if place < 2 else builder.lshr(words, distance)
    return builder.and_(shifted, ir.Constant(words.type, [0x30303030] * words.type.count))


def _has_short_sums(most: int, instruction: Instruction) -> bool:
    """Return whether 16 bits hold the sums of a group: those of 4-bit codes reach 16 * 2 * 15 * 127."""
    return instruction == "vpmaddwd" and most == 15


def emit_start(builder: Any, correction: Any, most: int, instruction: Instruction, lanes: int) -> Any:
    """Emit the vector from which the sums of a group begin."""
    if _has_short_sums(most, instruction):
        return ir.Constant(ir.VectorType(_INT16, 2 * lanes), [0] * 2 * lanes)
    return splat(builder, correction, lanes)


def emit_code_products(
    builder: Any, inputs: Sequence[Any], codes: Sequence[Any], sums: Any, most: int, instruction: Instruction
) -> Any:
    """Emit ``sums + inputs * codes`` over the four bytes of each lane of two words.

    Args:
        inputs: two int32, each of four signed bytes.
        codes: two vectors of int32, each of four bytes from 0 to ``most``.
        sums: the vector of ``emit_start``, or a result of this function.
    """
    lanes = codes[0].type.count
    rows = [splat(builder, each, lanes) for each in inputs]
    pairs = list(zip(codes, rows, strict=True))
    if instruction == "vpmulld":
        for unsigned, signed in pairs:
            sums = emit_single_bytes(builder, unsigned, signed, sums)
        return sums
    if instruction == "vpdpbusd":
        name = f"llvm.x86.avx512.vpdpbusd.{32 * lanes}"
        for unsigned, signed in pairs:
            sums = _call(builder, name, sums.type, [sums, unsigned, signed])
        return sums
    if most > 63:
        for unsigned, signed in pairs:
            sums = _emit_halves(builder, unsigned, signed, sums)
        return sums
    # A sum of 16 bits of these two has at most the magnitude 4 * 63 * 127, so it cannot overflow.
    name = "llvm.x86.avx512.pmaddubs.w.512" if lanes == 16 else "llvm.x86.avx2.pmadd.ub.sw"
    halves, octets = ir.VectorType(_INT16, 2 * lanes), ir.VectorType(_BYTE, 4 * lanes)
    short = None if not _has_short_sums(most, instruction) else sums
    for pair in pairs:
        products = _call(builder, name, halves, [builder.bitcast(each, octets) for each in pair])
        short = products if short is None else builder.add(short, products)
    return short if _has_short_sums(most, instruction) else builder.add(sums, _added_pairs(builder, short))


def emit_end(
    builder: Any, sums: Any, correction: Any, most: int, instruction: Instruction, lanes: int
) -> Any:
    """Emit the exact sums of a group, as int32."""
    if not _has_short_sums(most, instruction):
        return sums
    return builder.add(_added_pairs(builder, sums), splat(builder, correction, lanes))


def _emit_halves(builder: Any, unsigned: Any, signed: Any, sums: Any) -> Any:
    """Emit the products of the even and of the odd bytes, as integers of 16 bits, which cannot saturate."""
    lanes = sums.type.count
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    halves = ir.VectorType(_INT16, 2 * lanes)
    eight, low = (ir.Constant(halves, [number] * 2 * lanes) for number in (8, 255))
    codes, rows = (builder.bitcast(each, halves) for each in (unsigned, signed))
    even = builder.and_(codes, low), builder.ashr(builder.shl(rows, eight), eight)
    odd = builder.lshr(codes, eight), builder.ashr(rows, eight)
    for pair in (even, odd):
        sums = builder.add(sums, _call(builder, name, sums.type, list(pair)))
    return sums


def _added_pairs(builder: Any, short: Any) -> Any:
    """Emit the sums of each two neighbors of a vector of int16, as int32."""
    lanes = short.type.count // 2
    name = "llvm.x86.avx512.pmaddw.d.512" if lanes == 16 else "llvm.x86.avx2.pmadd.wd"
    ones = ir.Constant(short.type, [1] * short.type.count)
    return _call(builder, name, ir.VectorType(_INT32, lanes), [short, ones])


def _call(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(result, [each.type for each in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


@instruction
def read_in_groups(typingctx: Any, group: Any, index: Any, column: Any, stored: Any) -> Any:
    """Return the weight of one input and one column of the group at an address, as float32."""
    coding = GROUP_CODINGS.get(stored.dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if coding is None:
            return ir.Constant(_FLOAT, 0.0)  # never read, but compiled
        base = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        index, column = arguments[1:3]

        def constant(number: int) -> Any:
            return ir.Constant(_INT64, number)

        def load(offset: int, row: Any, item_bytes: int, kind: Any) -> Any:
            place = builder.add(builder.mul(row, constant(TILE_COLUMNS)), column)
            at = builder.add(builder.mul(place, constant(item_bytes)), constant(offset))
            return builder.load(builder.bitcast(builder.gep(base, [at]), kind.as_pointer()), align=1)

        def factor(offset: int, row: Any) -> Any:
            stored_factor = widened(builder, coding.scale_type, load(offset, row, 2, _INT16))
            return builder.fmul(stored_factor, ir.Constant(_FLOAT, 1 / SCALE_FACTOR))

        byte = builder.mul(builder.urem(index, constant(4)), constant(8))

        def bits(first_word: int, per_word: int) -> Any:
            """Emit a part of the code, whose word has those of this number of inputs."""
            num_bits, row = 32 // per_word, builder.udiv(index, constant(per_word))
            word = load(0, builder.add(row, constant(first_word)), 4, _INT32)
            place = builder.urem(builder.udiv(index, constant(4)), constant(8 // num_bits))
            shift = builder.add(byte, builder.mul(place, constant(num_bits)))
            shifted = builder.lshr(word, builder.trunc(shift, _INT32))
            return builder.and_(shifted, ir.Constant(_INT32, (1 << num_bits) - 1))

        code = bits(0, 4 if coding.bits == 8 else 8)
        if coding.bits == 6:
            code = builder.or_(code, builder.shl(bits(GROUP // 8, 16), ir.Constant(_INT32, 4)))
        value = builder.sitofp(builder.sub(code, ir.Constant(_INT32, coding.zero)), _FLOAT)
        weight = builder.fmul(
            value, factor(coding.code_bytes, builder.udiv(index, constant(coding.per_scale)))
        )
        if coding.has_offsets:
            weight = builder.fadd(weight, factor(coding.group_bytes - 2 * TILE_COLUMNS, constant(0)))
        return weight

    return types.float32(types.int64, types.int64, types.int64, stored), codegen


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
        sums = carray(pointer(at, np.int32), (SUM_WORD + 2,))
        scale, inverse = scale_and_inverse(first, GROUP)
        scales[SCALE_WORD] = scale * np.float32(1 / SCALE_FACTOR)
        for half in range(2):
            total = np.int32(0)
            for index in range(half * GROUP // 2, (half + 1) * GROUP // 2):
                integer = np.int32(0)
                if inverse != 0.0:
                    integer = np.int32(np.rint(values[index] * inverse))
                integers[index] = np.int8(integer)
                total += integer
            sums[SUM_WORD + half] = total
