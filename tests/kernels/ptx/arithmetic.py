"""PTX instructions that compute each thread's result from its own operands, as NumPy functions.

Semantics are those of NVIDIA's PTX ISA 8.7. ``fma`` and ``ex2`` are computed in float64 and rounded to
float32; in rare cases that differs from the hardware in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.program import Fault

Array = NDArray[Any]
Dtype = type[Any]


class Operation(NamedTuple):
    """A function of arrays of the given types, an element per thread."""

    inputs: tuple[Dtype, ...]
    compute: Callable[..., Array]


TYPES: dict[str, Dtype] = {
    "pred": np.bool_,
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
}
_WIDE: dict[Dtype, Dtype] = {
    np.int16: np.int32,
    np.uint16: np.uint32,
    np.int32: np.int64,
    np.uint32: np.uint64,
}
_BITWISE: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_ELEMENTWISE: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
    "ne": lambda a, b: (a < b) | (a > b),
    # The unordered comparisons are true if an operand is NaN.
    "neu": np.not_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}
_SMALLEST_NORMAL = np.float32(2.0**-126)


@cache
def find_operation(opcode: str) -> Operation:
    """Return the operation of an opcode such as ``mad.lo.s32``.

    Raises:
        Fault: the opcode is unknown.
    """
    name, *modifiers = opcode.split(".")
    kind = TYPES.get(modifiers[-1], np.uint32) if modifiers else np.uint32
    match name, modifiers:
        case ("cvt", [*_, target, source]):
            return _conversion(target, source, modifiers)
        case ("setp", [comparison, _]):
            return Operation((kind, kind), _COMPARISONS[comparison])
        case ("selp", _):
            return Operation((kind, kind, np.bool_), _select)
        case ("and" | "or" | "xor", _):
            return Operation((kind, kind), _BITWISE[name])
        case ("not", ["pred"]):
            return Operation((kind,), np.logical_not)
        case ("not", _):
            return Operation((kind,), np.invert)
        case ("mov", _):
            return Operation((kind,), lambda a: a)
        case ("add" | "sub" | "mul" | "fma", [*_, "f16x2"]):
            return _of_halves(find_operation(opcode.removesuffix("x2")))
        case ("mul" | "mad", ["wide", _]):
            wide = _WIDE[kind]
            return Operation((kind, kind, wide)[: 2 if name == "mul" else 3], _multiply_wide)
        case ("mul", ["hi", _]):
            bits = 8 * np.dtype(kind).itemsize
            return Operation((kind, kind), lambda a, b: (a.astype(_WIDE[kind]) * b >> bits).astype(kind))
        case ("mad", ["lo", _]):
            return Operation((kind, kind, kind), lambda a, b, c: a * b + c)
        case ("add" | "sub" | "mul", _):
            return Operation((kind, kind), _ELEMENTWISE[name])
        case ("fma", ["rn", "f32" | "f16"]):
            return Operation((kind,) * 3, lambda a, b, c: (a.astype(np.float64) * b + c).astype(kind))
        case ("div", ["full" | "rn" | "approx", "f32"]):
            return Operation((kind, kind), np.divide)
        case ("div" | "rem", _) if np.issubdtype(kind, np.integer):
            return Operation((kind, kind), _quotient if name == "div" else np.fmod)
        case ("min", _):
            return Operation((kind, kind), np.fmin)
        case ("max", _):
            return Operation((kind, kind), np.fmax)
        case ("neg", _):
            return Operation((kind,), np.negative)
        case ("abs", _):
            return Operation((kind,), np.abs)
        case ("ex2", ["approx", "ftz", "f32"]):
            return Operation((kind,), _exp2)
        case ("shl", _):
            return Operation((kind, np.uint32), _shift_left)
        case ("shr", _):
            return Operation((kind, np.uint32), _shift_right)
        case ("bfe", _):
            return Operation((kind, np.uint32, np.uint32), _extract_bits)
        case ("prmt", ["b32"]):
            return Operation((np.uint32,) * 3, _permute_bytes)
    raise Fault(f"unknown instruction: {opcode}")


def _select(a: Array, b: Array, is_first: Array) -> Array:
    return np.where(is_first, a, b)


def _of_halves(operation: Operation) -> Operation:
    """Return the operation on both float16 of each 32-bit register."""

    def compute(*packed: Array) -> Array:
        return operation.compute(*(each.view(np.float16) for each in packed)).view(np.uint32)

    return Operation((np.uint32,) * len(operation.inputs), compute)


def _multiply_wide(a: Array, b: Array, *added: Array) -> Array:
    wide = _WIDE[a.dtype.type]
    product: Array = a.astype(wide) * b.astype(wide)
    return product + added[0] if added else product


def _quotient(a: Array, b: Array) -> Array:
    """Divide integers and round toward zero."""
    return (a - np.fmod(a, b)) // b


def _exp2(x: Array) -> Array:
    x = np.where(np.abs(x) < _SMALLEST_NORMAL, 0, x)
    result = np.exp2(x.astype(np.float64)).astype(np.float32)
    return np.where(result < _SMALLEST_NORMAL, np.float32(0), result)


def _shift_left(a: Array, count: Array) -> Array:
    bits = 8 * a.itemsize
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(a.dtype), 0).astype(a.dtype)


def _shift_right(a: Array, count: Array) -> Array:
    bits = 8 * a.itemsize
    shifted: Array = a >> np.minimum(count, bits - 1).astype(a.dtype)
    if np.issubdtype(a.dtype, np.signedinteger):
        return shifted
    return np.where(count < bits, shifted, 0).astype(a.dtype)


def _extract_bits(a: Array, position: Array, length: Array) -> Array:
    """Return ``length`` bits from ``position`` on; those of a signed type are extended by their sign."""
    bits = a.astype(np.int64) >> position.astype(np.int64)
    size = np.int64(1) << length.astype(np.int64)
    bits = bits & (size - 1)
    if np.issubdtype(a.dtype, np.signedinteger):
        bits = np.where(bits >= size // 2, bits - size, bits)
    return bits.astype(a.dtype)


def _permute_bytes(low: Array, high: Array, selector: Array) -> Array:
    """Choose four of eight bytes; bit 3 of a choice fills the byte with the chosen one's sign."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for byte in range(4):
        choice = (selector >> (4 * byte)).astype(np.uint64)
        chosen = both >> 8 * (choice & 7) & 0xFF
        signs = np.where(chosen & 0x80, np.uint64(0xFF), np.uint64(0))
        result |= np.where(choice & 8, signs, chosen) << np.uint64(8 * byte)
    return result.astype(np.uint32)


def round_to_bfloat16(x: Array) -> Array:
    """Return float32 as bfloat16 bits in uint16, rounded half to even."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def widen_bfloat16(bits: Array) -> Array:
    """Return bfloat16 bits in uint16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _conversion(target: str, source: str, modifiers: list[str]) -> Operation:
    if target in ("bf16x2", "f16x2"):
        return Operation((np.float32, np.float32), _pack_bfloat16 if target == "bf16x2" else _pack_float16)
    wanted, given = TYPES[target], TYPES[source]
    if target == "bf16":
        return Operation((given,), round_to_bfloat16)
    if source == "bf16":
        return Operation((given,), lambda x: widen_bfloat16(x).astype(wanted))
    if np.issubdtype(given, np.floating) and np.issubdtype(wanted, np.integer):
        rounded = np.trunc if "rzi" in modifiers else np.rint
        return Operation((given,), lambda x: _saturate(rounded(x.astype(np.float64)), wanted))
    return Operation((given,), lambda x: x.astype(wanted))


def _saturate(x: Array, wanted: Dtype) -> Array:
    limits = np.iinfo(wanted)
    result: Array = np.nan_to_num(np.clip(x, limits.min, limits.max)).astype(wanted)
    return result


def _pack_bfloat16(high: Array, low: Array) -> Array:
    return round_to_bfloat16(high).astype(np.uint32) << 16 | round_to_bfloat16(low)


def _pack_float16(high: Array, low: Array) -> Array:
    bits = (each.astype(np.float16).view(np.uint16).astype(np.uint32) for each in (high, low))
    return next(bits) << 16 | next(bits)
