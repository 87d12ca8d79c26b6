"""Rounds groups of weights to integers, in vectors of columns that stay in registers."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import (
    GROUP,
    SQUARE,
    TILE_COLUMNS,
    Values,
    emit_loop,
    exact,
    instruction,
    transpose,
)
from quire.kernels.cpu.products.coded_product import place_in_word

PEAKS = {8: (127.0,), 4: (-8.0, -7.0, -7.25, -7.75, -8.25, -8.5, -8.75, -9.0)}
"""What the weight of the largest magnitude in a group may be in steps of its scale, by the number of bits.

With 4 bits these are the 8 of 48 candidates that together make the squared errors of normally distributed
weights smallest, by a greedy choice. Four bits can represent -8 but not 8, so they are negative.
"""
RANGES = {8: (-127.0, 127.0), 4: (-8.0, 7.0)}
"""Smallest and largest integer, by the number of bits."""

_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTEGERS = ir.VectorType(_FLOAT, SQUARE), ir.VectorType(_INT32, SQUARE)
_PARTS = range(0, TILE_COLUMNS, SQUARE)


@exact
def read_group(weight: int, in_features: int, group: Any, stored: Any, item_bytes: int) -> None:
    """Read ``GROUP`` inputs of a panel's columns as float32 ``[GROUP, TILE_COLUMNS]``.

    Args:
        weight: the address of the first input of the first column.
        in_features: the number of inputs of each column.
        stored: the NumPy type of the weights.
        item_bytes: its bytes.
    """
    for column in range(0, TILE_COLUMNS, SQUARE):
        for k in range(0, GROUP, SQUARE):
            square = np.int64(weight + item_bytes * (column * in_features + k))
            target = np.int64(group.ctypes.data + 4 * (k * TILE_COLUMNS + column))
            transpose(square, np.int64(in_features), target, TILE_COLUMNS, np.float32(1.0), stored, SQUARE)


@instruction
def find_scales(typingctx: Any, group: Any, scales: Any, divisors: Any, bits: Any) -> Any:
    """Write the bfloat16 scale of each column of a group that makes the sum of squared errors smallest.

    Args:
        group: address of float32 ``[GROUP, TILE_COLUMNS]``.
        scales: address of the result, float32.
        divisors: address of the scales again, with 1 in the place of 0, the scale of zeros.
        bits: the number of bits of an integer, a literal.
    """
    if not isinstance(bits, types.IntegerLiteral):
        return None
    num_bits = bits.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses = [builder.inttoptr(each, _FLOAT.as_pointer()) for each in arguments[:3]]

        def find(index: Any, _: Values) -> Values:
            part = builder.mul(index, ir.Constant(_INT64, SQUARE))
            rows, scales_at, divisors_at = (builder.gep(each, [part]) for each in addresses)
            largest = _emit_largest(builder, rows)
            tried = [_emit_scale(builder, largest, peak) for peak in PEAKS[num_bits]]
            best = tried[0]
            if len(tried) > 1:
                errors = _emit_errors(builder, rows, largest, [divisor for _, divisor in tried], num_bits)
                least = errors[0]
                for own, error in zip(tried[1:], errors[1:], strict=True):
                    is_better = builder.fcmp_ordered("<", error, least)
                    least = builder.select(is_better, error, least)
                    best = tuple(builder.select(is_better, *each) for each in zip(own, best, strict=True))
            _store(builder, best[0], scales_at, 0)
            _store(builder, best[1], divisors_at, 0)
            return {}

        emit_loop(builder, ir.Constant(_INT64, len(_PARTS)), {}, find)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, bits), codegen


def _emit_largest(builder: Any, rows: Any) -> Any:
    """Emit the weight of the largest magnitude of each column. A NaN counts as larger than all numbers."""

    def choose(k: Any, before: Values) -> Values:
        value = _load(builder, rows, builder.mul(k, ir.Constant(_INT64, TILE_COLUMNS)))
        magnitudes = (_magnitude_bits(builder, each) for each in (value, before[0]))
        return {0: builder.select(builder.icmp_signed(">", *magnitudes), value, before[0])}

    return emit_loop(builder, ir.Constant(_INT64, GROUP), {0: ir.Constant(_FLOATS, None)}, choose)[0]


def _magnitude_bits(builder: Any, values: Any) -> Any:
    return builder.and_(builder.bitcast(values, _INTEGERS), _splat(_INTEGERS, 0x7FFFFFFF))


def _emit_scale(builder: Any, largest: Any, peak: float) -> tuple[Any, Any]:
    """Emit the scale that makes the largest weight ``peak``, rounded to bfloat16, and its divisor."""
    quotient = builder.fdiv(largest, _splat(_FLOATS, peak))
    bits = builder.bitcast(quotient, _INTEGERS)
    last_kept_bit = builder.and_(builder.lshr(bits, _splat(_INTEGERS, 16)), _splat(_INTEGERS, 1))
    rounded = builder.add(bits, builder.add(last_kept_bit, _splat(_INTEGERS, 0x7FFF)))
    kept = builder.and_(rounded, _splat(_INTEGERS, -0x10000))
    is_nan = builder.fcmp_unordered("uno", quotient, quotient)
    scale = builder.bitcast(builder.select(is_nan, _splat(_INTEGERS, 0x7FC00000), kept), _FLOATS)
    is_zero = builder.fcmp_ordered("==", scale, _splat(_FLOATS, 0.0))
    return scale, builder.select(is_zero, _splat(_FLOATS, 1.0), scale)


def _emit_errors(builder: Any, rows: Any, largest: Any, divisors: list[Any], bits: int) -> list[Any]:
    """Emit for each divisor the columns' sums of squared errors."""
    inverses = [builder.fdiv(_splat(_FLOATS, 1.0), each) for each in divisors]

    def sums(divides: bool) -> Values:
        def add(k: Any, sums: Values) -> Values:
            value = _load(builder, rows, builder.mul(k, ir.Constant(_INT64, TILE_COLUMNS)))
            for number, (divisor, inverse) in enumerate(zip(divisors, inverses, strict=True)):
                if divides:
                    quotient = builder.fdiv(value, divisor)
                else:
                    # For bfloat16 divisors, this is the correctly rounded quotient (Markstein, 1990).
                    estimate = builder.fmul(value, inverse)
                    rest = _call(builder, "fma", builder.fneg(estimate), divisor, value)
                    quotient = _call(builder, "fma", rest, inverse, estimate)
                error = builder.fsub(value, builder.fmul(_rounded(builder, quotient, bits), divisor))
                sums = {**sums, number: builder.fadd(sums[number], builder.fmul(error, error))}
            return sums

        zeros = dict.fromkeys(range(len(divisors)), ir.Constant(_FLOATS, None))
        return emit_loop(builder, ir.Constant(_INT64, GROUP), zeros, add)

    with builder.if_else(_all_are_ordinary(builder, largest)) as (ordinary, others):
        with ordinary:
            fast, fast_end = sums(divides=False), builder.block
        with others:
            slow, slow_end = sums(divides=True), builder.block
    errors = []
    for number in range(len(divisors)):
        errors.append(builder.phi(_FLOATS))
        errors[-1].add_incoming(fast[number], fast_end)
        errors[-1].add_incoming(slow[number], slow_end)
    return errors


def _all_are_ordinary(builder: Any, largest: Any) -> Any:
    """Emit whether with these largest weights no inverse, quotient or rest can overflow or underflow."""
    bits = _magnitude_bits(builder, largest)
    smallest, most = ((127 + exponent) << 23 for exponent in (-90, 90))
    is_between = builder.and_(
        builder.icmp_signed(">", bits, _splat(_INTEGERS, smallest)),
        builder.icmp_signed("<", bits, _splat(_INTEGERS, most)),
    )
    is_ordinary = builder.or_(is_between, builder.icmp_signed("==", bits, _splat(_INTEGERS, 0)))
    lanes = ir.IntType(SQUARE)
    return builder.icmp_signed("==", builder.bitcast(is_ordinary, lanes), ir.Constant(lanes, -1))


@instruction
def write_words(typingctx: Any, group: Any, scales: Any, target: Any, bits: Any) -> Any:
    """Write the integers of a group as words ``[GROUP * bits / 32, TILE_COLUMNS]``.

    Args:
        group: address of float32 ``[GROUP, TILE_COLUMNS]``.
        scales: address of the columns' scales, float32; none is 0.
        target: address of the result.
        bits: the number of bits of an integer, a literal.
    """
    if not isinstance(bits, types.IntegerLiteral):
        return None
    num_bits = bits.literal_value
    per_word = 32 // num_bits
    mask = _splat(_INTEGERS, (1 << num_bits) - 1)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, scales_at = (builder.inttoptr(each, _FLOAT.as_pointer()) for each in arguments[:2])
        words = builder.inttoptr(arguments[2], _INT32.as_pointer())
        scales = {part: _load(builder, scales_at, part) for part in _PARTS}

        def write(index: Any, _: Values) -> Values:
            row = builder.gep(rows, [builder.mul(index, ir.Constant(_INT64, per_word * TILE_COLUMNS))])
            to = builder.gep(words, [builder.mul(index, ir.Constant(_INT64, TILE_COLUMNS))])
            for part in _PARTS:
                word: Any = ir.Constant(_INTEGERS, None)
                for number in range(per_word):
                    value = _load(builder, row, number * TILE_COLUMNS + part)
                    rounded = _rounded(builder, builder.fdiv(value, scales[part]), num_bits)
                    integer = builder.and_(builder.fptosi(rounded, _INTEGERS), mask)
                    shift = num_bits * place_in_word(number, num_bits)
                    word = builder.or_(word, builder.shl(integer, _splat(_INTEGERS, shift)))
                _store(builder, word, to, part)
            return {}

        emit_loop(builder, ir.Constant(_INT64, GROUP // per_word), {}, write)
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3, bits), codegen


def _rounded(builder: Any, quotients: Any, bits: int) -> Any:
    """Emit the integers, as float32, that are nearest to quotients; half to even."""
    integers = _call(builder, "rint", quotients)
    for operator, bound in zip("<>", RANGES[bits], strict=True):
        limit = _splat(_FLOATS, bound)
        integers = builder.select(builder.fcmp_ordered(operator, integers, limit), limit, integers)
    return integers


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """Emit a call of one of LLVM's functions of vectors."""
    signature = ir.FunctionType(_FLOATS, [_FLOATS] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{SQUARE}f32")
    return builder.call(function, arguments)


def _splat(kind: Any, number: float) -> Any:
    return ir.Constant(kind, [number] * SQUARE)


def _load(builder: Any, base: Any, place: Any) -> Any:
    place = ir.Constant(_INT64, place) if isinstance(place, int) else place
    return builder.load(builder.bitcast(builder.gep(base, [place]), _FLOATS.as_pointer()), align=4)


def _store(builder: Any, vector: Any, base: Any, place: int) -> None:
    at = builder.gep(base, [ir.Constant(_INT64, place)])
    builder.store(vector, builder.bitcast(at, vector.type.as_pointer()), align=4)
