"""Products by tiles (AMX): of bfloat16 in the order of the instruction ``tdpbf16ps``, with tiles or without.

This instruction multiplies a tile of up to 16 rows of 32 inputs by a tile of 32 inputs of 16 columns. For
each output, one chain of fused multiplications sums the products of the inputs at even places, from zero, and
another one those at odd places. Then the sum of both chains is added to the output. Results are rounded to
the nearest float32, half to even, and denormal numbers are zero (Intel, Software Developer's Manual, volume
2, TDPBF16PS). Tiles of any number of rows thus have the same bits, and so do vectors of float32 that are
multiplied and added in this order.

As in ``bfloat16_product``, the earlier input of a pair is stored second: the sum of two chains does not
depend on which comes first.

    panel   [in_features / 32, TILE_COLUMNS / 16] tiles
    tile    [16, 16, 2]       column 0    column 1    …
            inputs 0 and 1   | k=1 | k=0 | k=1 | k=0 | …
            inputs 2 and 3   | k=3 | k=2 | k=3 | k=2 | …

The instruction ``tdpbusd`` multiplies integers of 8 bits, 64 inputs at a time. Its sums are exact, and its
tiles are parts of the panels of ``integer_product``.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from quire.kernels.cpu.intrinsics import Values, constant_of, emit_loop, instruction, processor_features

logger = logging.getLogger(__name__)

FLOAT32 = "float32-2"
"""Name of the order of sums of all other products: that of the inputs."""
AMX_BFLOAT16 = "amx-bf16-3"
"""Name of the order of sums of these products, in linear layers and in attention."""
FEATURES = frozenset({"amx-tile", "amx-bf16"})
"""LLVM's names of the features of processors that have the instruction for bfloat16."""
INTEGER_FEATURES = frozenset({"amx-tile", "amx-int8"})
"""Those of processors that have the instruction for integers."""
CHAINS: Any = np.uint64
"""NumPy type that stands in Numba for weights that vectors of float32 multiply in this order."""
TILES: Any = np.int64
"""NumPy type that stands in Numba for the same weights, multiplied by tiles."""
INTEGER_TILES: Any = np.complex64
"""NumPy type that stands in Numba for the weights of ``integer_product``, multiplied by tiles."""
TILE_SIDE = 16
"""Most rows of a tile, and its columns."""
TILE_INPUTS = 32
"""Inputs in bfloat16 that one instruction multiplies."""
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_SIDE * TILE_ROW_BYTES

_BYTE = ir.IntType(8)
_INT64 = ir.IntType(64)
_PRODUCTS = {types.int64: "tdpbf16ps", types.complex64: "tdpbusd"}
"""Instruction by the Numba type of the weights."""
_PREFIX = "llvm.x86."
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
# The registers of tiles. Those of sums are numbered by row of tiles, then by column of tiles.
_INPUTS, _WEIGHTS = (4, 5), (6, 7)
_OF_SECOND_ROW = (2, 3, _INPUTS[1])


@cache
def may_use_tiles(needed: frozenset[str] = FEATURES) -> bool:
    """Return whether the processor has some features, and Linux permits tiles to this process, which asks."""
    features = processor_features()
    if not all(features.get(name, False) for name in needed):
        return False
    if platform.system() != "Linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return True
    logger.warning(
        "Linux permits no AMX tiles to this process (error %d), so prompts are slower", ctypes.get_errno()
    )
    return False


has_tile_products = constant_of(types.boolean, lambda stored: stored in _PRODUCTS)
"""Whether tiles multiply weights of a stored type, in a kernel."""


@instruction
def configure_tiles(typingctx: Any, first: Any, second: Any, row_bytes: Any, stored: Any) -> Any:
    """Give this thread's registers the shapes of tiles for ``add_tile_products``, and zero them.

    Other libraries use tiles, too, so no configuration can be expected from before.

    Args:
        first, second: rows of the first and of the second row of tiles.
        row_bytes: bytes of inputs in a row of a tile, at most ``TILE_ROW_BYTES``.
        stored: nothing happens unless tiles multiply weights of this type.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype not in _PRODUCTS:
            return context.get_dummy_value()
        all_bytes = ir.VectorType(_BYTE, 64)
        # The palette 1, then from byte 16 the bytes of a row as 16 bits, and from byte 48 the rows.
        shapes = [1, *[0] * 15, *[TILE_ROW_BYTES, 0] * 8, *[0] * 32]
        value = ir.Constant(all_bytes, shapes)
        first_rows, second_rows, row_bytes = (builder.trunc(each, _BYTE) for each in arguments[:3])
        # A row of a tile of weights has the weights of 4 bytes of inputs.
        weight_rows = builder.lshr(row_bytes, ir.Constant(_BYTE, 2))

        def insert(place: int, byte: Any) -> None:
            nonlocal value
            value = builder.insert_element(value, byte, ir.Constant(ir.IntType(32), place))

        for register in range(_WEIGHTS[0]):
            insert(48 + register, second_rows if register in _OF_SECOND_ROW else first_rows)
        for register in _INPUTS:
            insert(16 + 2 * register, row_bytes)
        for register in _WEIGHTS:
            insert(48 + register, weight_rows)
        memory = cgutils.alloca_once(builder, all_bytes)
        builder.store(value, memory)
        _emit(builder, "ldtilecfg", builder.bitcast(memory, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, stored), codegen


@instruction
def release_tiles(typingctx: Any, stored: Any) -> Any:
    """End this thread's use of tiles, which the system then need not save."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype in _PRODUCTS:
            _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(stored), codegen


@instruction
def add_tile_products(
    typingctx: Any,
    total: Any,
    left: Any,
    right: Any,
    num_tiles: Any,
    strides: Any,
    num_rows: Any,
    num_columns: Any,
    stored: Any,
) -> Any:
    """Add the products of some tiles to sums in float32 or int32, after ``configure_tiles``.

    Args:
        total, left, right: addresses of the sums, of rows of inputs, and of the first tile of weights.
        num_tiles: tiles whose products a sum adds.
        strides: bytes from one row of total to the next, from one row of left to the next, from a tile of
            left to the next, and from a tile of right to the next inputs of its columns, to the next columns,
            and from one of its rows to the next.
        num_rows, num_columns: number of tiles of sums, literals: at most 2 rows, and 4 tiles in all.
        stored: nothing happens unless tiles multiply weights of this type.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (num_rows, num_columns)):
        return None
    rows, columns = range(num_rows.literal_value), range(num_columns.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype not in _PRODUCTS:
            return context.get_dummy_value()
        total_at, left_at, right_at, count = arguments[:4]
        total_stride, left_stride, *right_strides = cgutils.unpack_tuple(builder, arguments[4])
        input_stride, depth_stride, column_stride, row_stride = right_strides

        def moved(base: Any, stride: Any, count: Any) -> Any:
            factor = count if isinstance(count, ir.Value) else ir.Constant(_INT64, count)
            return builder.add(base, builder.mul(stride, factor))

        def move(name: str, register: int, address: Any, stride: Any) -> None:
            at = builder.inttoptr(address, _BYTE.as_pointer())
            _emit(builder, name, ir.Constant(_BYTE, register), at, stride)

        sums = {
            row * len(columns) + column: builder.add(
                moved(total_at, total_stride, TILE_SIDE * row), ir.Constant(_INT64, 4 * TILE_SIDE * column)
            )
            for row in rows
            for column in columns
        }

        def add(block: Any, _: Values) -> Values:
            offset = builder.mul(block, input_stride)
            for row in rows:
                at = builder.add(moved(left_at, left_stride, TILE_SIDE * row), offset)
                move("tileloadd64", _INPUTS[row], at, left_stride)
            first = moved(right_at, depth_stride, block)
            for column in columns:
                weights = _WEIGHTS[column % len(_WEIGHTS)]
                at = moved(first, column_stride, column)
                move("tileloadd64", weights, at, row_stride)
                for row in rows:
                    registers = (row * len(columns) + column, _INPUTS[row], weights)
                    _emit(builder, _PRODUCTS[stored.dtype], *(ir.Constant(_BYTE, each) for each in registers))
            return {}

        for register, address in sums.items():
            move("tileloadd64", register, address, total_stride)
        emit_loop(builder, count, {}, add)
        for register, address in sums.items():
            move("tilestored64", register, address, total_stride)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, strides, num_rows, num_columns, stored), codegen


def _emit(builder: Any, name: str, *arguments: Any) -> None:
    """Emit one of LLVM's functions for an instruction, whose result is none."""
    function_type = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, _PREFIX + name), arguments)
