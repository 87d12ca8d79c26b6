"""Weights as quantized checkpoints store them: codes of 4 or 8 bits with a scale for each group of inputs.

A weight is the value of its code minus the zero point of its group, times the scale of its group. Both
operations round to float32, as dequantizing does. Products then run over the inputs in the order of float32
weights, so the results have the bits of the dequantized weight in float32.

A panel is a run of groups of ``GROUP`` inputs. A group has its codes and then a word of 32 bits for each
column. Codes of 4 bits are in words as in ``packed_product``, those of 8 bits in ``[GROUP, TILE_COLUMNS]``.
The last word is the float32 scale. If there are zero points, they are in the bits of ``ZERO_MASK``, which
are zeros in scales of 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.extending import register_jitable

from quire.kernels.cpu.intrinsics import (
    GROUP,
    TILE_COLUMNS,
    Values,
    constant_of,
    emit_loop,
    exact,
    instruction,
    pointer,
    processor_features,
    widened,
)

INT4, UINT4, E2M1, INT8, E4M3 = (
    np.dtype([(name, np.uint8)]) for name in ("int4", "uint4", "e2m1", "int8", "e4m3")
)
"""NumPy types that stand for these weights in Numba: only those of ``UINT4`` have zero points."""
ZERO_MASK = 31
"""Bits of the zero point in the word of a group."""
_HALF_OF_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_UNROLLED = 8
"""Inputs in the body of a loop."""

_BYTE = ir.IntType(8)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_FLOAT = ir.FloatType()


class Coding(NamedTuple):
    """What codes mean: the values of 4 bits, or the Numba type of 8 bits."""

    table: tuple[float, ...] | None
    element: Any = None
    has_zeros: bool = False

    @property
    def group_bytes(self) -> int:
        """Bytes of a group of one panel."""
        return TILE_COLUMNS * (GROUP // (2 if self.table else 1) + 4)


CODINGS: dict[Any, Coding] = {
    from_dtype(INT4): Coding(tuple(float(value) for value in range(-8, 8))),
    from_dtype(UINT4): Coding(tuple(float(value) for value in range(16)), has_zeros=True),
    from_dtype(E2M1): Coding((*_HALF_OF_E2M1, *(-value for value in _HALF_OF_E2M1))),
    from_dtype(INT8): Coding(None, types.int8),
    from_dtype(E4M3): Coding(None, types.uint8),
}
"""By the Numba type of the weights."""


@register_jitable
def place_in_word(number: int, bits: int) -> int:
    """Return the place in a word of one of its inputs."""
    return number if bits == 8 else number % 4 * 2 + number // 4


is_coded = constant_of(types.boolean, lambda stored: stored in CODINGS)
"""Whether weights are codes, in a kernel."""


def emit_groups(
    builder: Any,
    coding: Coding,
    rights: list[Any],
    depth: Any,
    starts: Values,
    use: Callable[[Values, Any, list[Any]], Values],
) -> Values:
    """Emit ``sums = use(sums, k, weights)`` for each input ``k`` below ``depth``; return the last sums.

    Args:
        rights: pointers to the bytes of panels.
        depth: number of inputs, whole groups.
        starts: the first sums.
        use: gets the weights of an input as vectors of ``float_lanes()``, panel by panel.
    """
    lanes = float_lanes()
    code_bytes = coding.group_bytes - 4 * TILE_COLUMNS

    def load(offset: Any, element: Any) -> list[Any]:
        """Emit the loads of a row of all panels, ``offset`` bytes from their beginnings."""
        vector = ir.VectorType(element, lanes).as_pointer()
        parts = []
        for right in rights:
            at = builder.bitcast(builder.gep(right, [offset]), vector)
            for part in range(TILE_COLUMNS // lanes):
                parts.append(builder.load(builder.gep(at, [ir.Constant(_INT64, part)]), align=1))
        return parts

    def moved(offset: Any, distance: int) -> Any:
        return builder.add(offset, ir.Constant(_INT64, distance))

    def add_group(group: Any, sums: Values) -> Values:
        start = builder.mul(group, ir.Constant(_INT64, coding.group_bytes))
        factors = [_factors(builder, coding, each, lanes) for each in load(moved(start, code_bytes), _INT32)]

        def add_inputs(index: Any, sums: Values) -> Values:
            at = builder.add(start, builder.mul(index, ir.Constant(_INT64, code_bytes * _UNROLLED // GROUP)))
            k = builder.add(
                builder.mul(group, ir.Constant(_INT64, GROUP)),
                builder.mul(index, ir.Constant(_INT64, _UNROLLED)),
            )
            words = load(at, _INT32) if coding.table else []
            for number in range(_UNROLLED):
                codes = words or load(moved(at, number * TILE_COLUMNS), _BYTE)
                values = [_value(builder, coding, each, number, lanes) for each in codes]
                weights = [_weight(builder, *each) for each in zip(values, factors, strict=True)]
                sums = use(sums, moved(k, number), weights)
            return sums

        return emit_loop(builder, ir.Constant(_INT64, GROUP // _UNROLLED), sums, add_inputs)

    return emit_loop(builder, builder.udiv(depth, ir.Constant(_INT64, GROUP)), starts, add_group)


def float_lanes() -> int:
    """Return how many float32 a register has."""
    return 16 if processor_features().get("avx512f") else 8


def _factors(builder: Any, coding: Coding, word: Any, lanes: int) -> tuple[Any, Any]:
    """Emit the scales and the zero points, or None, of words of a group."""

    def wide(kind: Any) -> Any:
        return ir.VectorType(kind, lanes) if lanes else kind

    def constant(number: int) -> Any:
        return ir.Constant(wide(_INT32), [number] * lanes if lanes else number)

    if not coding.has_zeros:
        return builder.bitcast(word, wide(_FLOAT)), None
    scale = builder.bitcast(builder.and_(word, constant(~ZERO_MASK)), wide(_FLOAT))
    return scale, builder.uitofp(builder.and_(word, constant(ZERO_MASK)), wide(_FLOAT))


def _weight(builder: Any, value: Any, factors: tuple[Any, Any]) -> Any:
    scale, zero = factors
    return builder.fmul(value if zero is None else builder.fsub(value, zero), scale)


def _value(builder: Any, coding: Coding, codes: Any, number: int, lanes: int) -> Any:
    """Emit the values of the codes of an input; those of 4 bits are ``number`` in their words."""
    if coding.table is None:
        return widened(builder, coding.element, codes, lanes)
    shift = ir.Constant(codes.type, [4 * place_in_word(number, 4)] * lanes)
    return _look_up(builder, coding.table, builder.lshr(codes, shift), lanes)


def _look_up(builder: Any, table: tuple[float, ...], indices: Any, lanes: int) -> Any:
    """Emit the values of a table at the lowest 4 bits of each index."""
    features, vector = processor_features(), ir.VectorType(_FLOAT, lanes)
    name = "llvm.x86.avx512.permvar.sf.512" if lanes == 16 else "llvm.x86.avx2.permps"
    function_type = ir.FunctionType(vector, [vector, indices.type])
    if features.get("avx2"):
        parts = [ir.Constant(vector, table[first : first + lanes]) for first in range(0, 16, lanes)]
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        found = [builder.call(function, [part, indices]) for part in parts]
        if len(found) == 1:
            return found[0]
        upper_bit = builder.shl(indices, ir.Constant(indices.type, [28] * lanes))
        is_upper = builder.icmp_signed("<", upper_bit, ir.Constant(indices.type, [0] * lanes))
        return builder.select(is_upper, found[1], found[0])
    result = ir.Constant(vector, [0.0] * lanes)
    for lane in range(lanes):
        place = ir.Constant(_INT32, lane)
        value = _look_up_one(builder, table, builder.extract_element(indices, place))
        result = builder.insert_element(result, value, place)
    return result


def _look_up_one(builder: Any, table: tuple[float, ...], index: Any) -> Any:
    values = ir.Constant(ir.VectorType(_FLOAT, 16), table)
    return builder.extract_element(values, builder.and_(index, ir.Constant(_INT32, 15)))


@instruction
def decode(typingctx: Any, panel: Any, depth: Any, target: Any, stored: Any) -> Any:
    """Write the first weights of a panel, if they are codes, as float32 ``[depth, TILE_COLUMNS]``.

    Args:
        panel, target: addresses.
        depth: number of inputs, whole groups.
    """
    coding = CODINGS.get(stored.dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if coding is not None:
            lanes = float_lanes()
            vector = ir.VectorType(_FLOAT, lanes).as_pointer()
            right = builder.inttoptr(arguments[0], _BYTE.as_pointer())
            output = builder.inttoptr(arguments[2], vector)

            def write(sums: Values, k: Any, weights: list[Any]) -> Values:
                first = builder.mul(k, ir.Constant(_INT64, TILE_COLUMNS // lanes))
                for part, each in enumerate(weights):
                    at = builder.gep(output, [builder.add(first, ir.Constant(_INT64, part))])
                    builder.store(each, at, align=4)
                return sums

            emit_groups(builder, coding, [right], arguments[1], {}, write)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, stored), codegen


@instruction
def _decode_one(typingctx: Any, code: Any, word: Any, stored: Any) -> Any:
    """Return the weight of a code and the word of its group."""
    coding = CODINGS.get(stored.dtype)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if coding is None:
            return ir.Constant(_FLOAT, 0.0)  # never read, but compiled
        if coding.table is None:
            value = widened(builder, coding.element, builder.trunc(arguments[0], _BYTE))
        else:
            value = _look_up_one(builder, coding.table, arguments[0])
        return _weight(builder, value, _factors(builder, coding, arguments[1], 0))

    return types.float32(types.int32, types.int32, stored), codegen


_code_bits = constant_of(types.int64, lambda stored: 4 if stored in CODINGS and CODINGS[stored].table else 8)
"""Bits of a code, in a kernel."""


@exact
def read_code(group: int, index: int, column: int, stored: Any) -> np.float32:
    """Return the weight of one input and one column of the group at an address."""
    bits = _code_bits(stored)
    codes = carray(pointer(group, np.uint8), (GROUP * TILE_COLUMNS,))
    code = np.int32(codes[(index * TILE_COLUMNS + column) % len(codes)])
    if bits == 4:
        words = carray(pointer(group, np.int32), (GROUP // 8, TILE_COLUMNS))
        code = np.int32(words[index // 8, column] >> np.int32(4 * place_in_word(index % 8, 4)))
    ends = carray(pointer(group + GROUP * TILE_COLUMNS * bits // 8, np.int32), (TILE_COLUMNS,))
    weight: np.float32 = _decode_one(code, ends[column], stored)
    return weight
