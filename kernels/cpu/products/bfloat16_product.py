"""Products of bfloat16 by the instruction ``vdpbf16ps`` (AVX-512-BF16), with the bits of products in float32.

The instruction multiplies the pairs of two registers and adds both products to a float32: first that of the
pair's second value, then that of the first, each with one rounding, as two fused multiplications. Weights and
inputs are therefore stored in pairs with the earlier input second, so each sum runs over the inputs in order.
A product of two bfloat16 is exact in float32, so the bits are those of float32 products. The instruction
treats denormal numbers as zero; ``flush_denormals`` makes the other products do the same.

    panel   [in_features / 2, TILE_COLUMNS, 2]      column 0    column 1    column 2
            inputs 0 and 1                         | k=1 | k=0 | k=1 | k=0 | k=1 | k=0 | …
            inputs 2 and 3                         | k=3 | k=2 | k=3 | k=2 | …
    row     [in_features / 2, 2]                   | k=1 | k=0 | k=3 | k=2 | …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import (
    TILE_COLUMNS,
    Values,
    emit_loop,
    exact,
    instruction,
    is_zen,
    pointer,
    processor_features,
    splat,
)

PAIRS: Any = np.uint32
"""NumPy type that stands for pairs of bfloat16 in Numba."""
LANES = 16
"""Pairs that one instruction multiplies."""
_FLOAT = ir.FloatType()
_INT16 = ir.IntType(16)
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
_SUMS = ir.VectorType(_FLOAT, LANES)
_FLUSH = 0x8040
"""Bits of the control register MXCSR: denormal inputs and results are zero."""


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """LLVM's type ``bfloat``, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_PAIRS_VECTOR = ir.VectorType(_Bfloat16(), 2 * LANES)


def prefers_pair_products() -> bool:
    """Return whether the instruction is the fastest way to its bits.

    AMD's processors multiply twice as many values by it in a cycle as by fused multiplications of float32,
    Intel's half as many.
    """
    return TILE_COLUMNS > LANES and is_zen() and processor_features().get("avx512bf16", False)


def emit_pair_products(builder: Any, inputs: Sequence[Any], weights: Any, sums: Any) -> Any:
    """Emit ``sums + inputs * weights`` over pairs: one of inputs, and ``LANES`` of weights, as int32."""
    function_type = ir.FunctionType(_SUMS, [_SUMS, _PAIRS_VECTOR, _PAIRS_VECTOR])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    pairs = [builder.bitcast(each, _PAIRS_VECTOR) for each in (splat(builder, inputs[0], LANES), weights)]
    return builder.call(function, [sums, *pairs])


@instruction
def flush_denormals(typingctx: Any, stored: Any) -> Any:
    """Treat denormal inputs and results of this thread as zero, if products have bfloat16 weights.

    Return the former state of the register MXCSR. Only x86 has this register and ``vdpbf16ps``.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not _flushes(stored):
            return ir.Constant(_INT32, 0)
        before, flushing = (cgutils.alloca_once(builder, _INT32) for _ in range(2))
        _call_with_register(builder, "llvm.x86.sse.stmxcsr", before)
        builder.store(builder.or_(builder.load(before), ir.Constant(_INT32, _FLUSH)), flushing)
        _call_with_register(builder, "llvm.x86.sse.ldmxcsr", flushing)
        return builder.load(before)

    return types.int32(stored), codegen


@instruction
def restore_denormals(typingctx: Any, register: Any, stored: Any) -> Any:
    """Undo ``flush_denormals``, which has returned ``register``."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _flushes(stored):
            saved = cgutils.alloca_once_value(builder, arguments[0])
            _call_with_register(builder, "llvm.x86.sse.ldmxcsr", saved)
        return context.get_dummy_value()

    return types.none(types.int32, stored), codegen


def _flushes(stored: Any) -> bool:
    is_x86 = binding.get_process_triple().startswith("x86_64")
    return is_x86 and stored.dtype in (types.uint16, types.uint32, types.uint64, types.int64)


def _call_with_register(builder: Any, name: str, register: Any) -> None:
    byte_pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    builder.call(function, [builder.bitcast(register, byte_pointer)])


@exact
def encode_pairs(source: int, target: int, length: int) -> None:
    """Write an even number of float32 that are bfloat16 values as pairs; both are addresses."""
    num_vectors = length // (2 * LANES)
    if num_vectors > 0:
        _encode_vectors(np.int64(source), np.int64(target), np.int64(num_vectors))
    words = carray(pointer(source, np.uint32), (length,))
    pairs = carray(pointer(target, np.uint32), (length // 2,))
    for index in range(num_vectors * LANES, length // 2):
        pairs[index] = words[2 * index] & np.uint32(0xFFFF0000) | words[2 * index + 1] >> np.uint32(16)


@instruction
def _encode_vectors(typingctx: Any, source: Any, target: Any, num_vectors: Any) -> Any:
    """Write at least one vector of pairs as ``encode_pairs`` does; LLVM does not for short rows."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves = ir.VectorType(_INT16, 2 * LANES)
        # Of each two values, first the upper half of the second one.
        upper = [2 * lane + 1 for pair in range(0, 2 * LANES, 2) for lane in (pair + 1, pair)]
        mask = ir.Constant(ir.VectorType(_INT32, 2 * LANES), upper)
        wide, narrow = (builder.inttoptr(each, halves.as_pointer()) for each in arguments[:2])

        def encode_vector(index: Any, _: Values) -> Values:
            first = builder.gep(wide, [builder.shl(index, ir.Constant(_INT64, 1))])
            second = builder.gep(first, [ir.Constant(_INT64, 1)])
            values = [builder.load(each, align=4) for each in (first, second)]
            builder.store(builder.shuffle_vector(*values, mask), builder.gep(narrow, [index]), align=4)
            return {}

        emit_loop(builder, arguments[2], {}, encode_vector)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), codegen


def swap_pairs(values: torch.Tensor) -> torch.Tensor:
    """Swap neighbouring values along the last dimension."""
    swapped: torch.Tensor = values.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return swapped
