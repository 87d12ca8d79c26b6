"""Products of bfloat16 in the order of the instruction ``tdpbf16ps`` (AMX), with tiles or without.

The instruction multiplies a tile of up to 16 rows of 32 inputs by a tile of 32 inputs of 16 columns. For each
output, one chain of fused multiplications sums the products of the inputs at even places, from zero, and
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

from quire.kernels.cpu.intrinsics import Values, emit_loop, instruction, processor_features

logger = logging.getLogger(__name__)

FLOAT32 = "float32-1"
"""Name of the order of sums of all other products: that of the inputs."""
AMX_BFLOAT16 = "amx-bf16-1"
"""Name of the order of sums of these products."""
FEATURES = frozenset({"amx-tile", "amx-bf16"})
"""LLVM's names of the features of processors that have the instruction."""
CHAINS: Any = np.uint64
"""NumPy type that stands in Numba for weights that vectors of float32 multiply in this order."""
TILES: Any = np.int64
"""NumPy type that stands in Numba for the same weights, multiplied by tiles."""
TILE_SIDE = 16
"""Most rows of a tile, and its columns."""
TILE_INPUTS = 32
"""Inputs that one instruction multiplies."""
TILE_BYTES = 2 * TILE_SIDE * TILE_INPUTS

_BYTE = ir.IntType(8)
_INT64 = ir.IntType(64)
_PREFIX = "llvm.x86."
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
# The registers of tiles. Those of sums are numbered by row of tiles, then by column of tiles.
_INPUTS, _WEIGHTS = (4, 5), (6, 7)
_OF_SECOND_ROW = (2, 3, _INPUTS[1])


@cache
def may_use_tiles() -> bool:
    """Return whether the processor has tiles and Linux permits them to this process, which asks once."""
    features = processor_features()
    if not all(features.get(name, False) for name in FEATURES):
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


@instruction
def has_tile_products(typingctx: Any, stored: Any) -> Any:
    """Return whether tiles multiply weights of a stored type."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return ir.Constant(ir.IntType(1), stored.dtype == types.int64)

    return types.boolean(stored), codegen


@instruction
def configure_tiles(typingctx: Any, first: Any, second: Any, stored: Any) -> Any:
    """Give this thread's registers the shapes of tiles for ``add_tile_products``, and zero them.

    Other libraries use tiles, too, so no configuration can be expected from before.

    Args:
        first, second: rows of the first and of the second row of tiles.
        stored: nothing happens unless it is ``TILES``.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype != types.int64:
            return context.get_dummy_value()
        all_bytes = ir.VectorType(_BYTE, 64)
        # The palette 1, then from byte 16 the bytes of a row as 16 bits, and from byte 48 the rows.
        shapes = [1, *[0] * 15, *[4 * TILE_SIDE, 0] * 8, *[0] * 16, *[TILE_SIDE] * 8, *[0] * 8]
        value = ir.Constant(all_bytes, shapes)
        first_rows, second_rows = (builder.trunc(rows, _BYTE) for rows in arguments[:2])
        for register in range(_WEIGHTS[0]):
            rows = second_rows if register in _OF_SECOND_ROW else first_rows
            value = builder.insert_element(value, rows, ir.Constant(ir.IntType(32), 48 + register))
        memory = cgutils.alloca_once(builder, all_bytes)
        builder.store(value, memory)
        _emit(builder, "ldtilecfg", builder.bitcast(memory, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, stored), codegen


@instruction
def release_tiles(typingctx: Any, stored: Any) -> Any:
    """End this thread's use of tiles, which the system then need not save."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype == types.int64:
            _emit(builder, "tilerelease")
        return context.get_dummy_value()

    return types.none(stored), codegen


@instruction
def add_tile_products(
    typingctx: Any,
    total: Any,
    left: Any,
    right: Any,
    depth: Any,
    strides: Any,
    num_rows: Any,
    num_columns: Any,
    stored: Any,
) -> Any:
    """Add the products of some tiles to float32 sums, after ``configure_tiles``.

    Args:
        total, left, right: addresses of the sums, of rows of bfloat16 in pairs, and of the first tile.
        depth: inputs to sum, a multiple of ``TILE_INPUTS``.
        strides: bytes from one row of total to the next, from one row of left to the next, from a tile of
            right to the next inputs of its columns, and from there to the next columns.
        num_rows, num_columns: number of tiles, literals: at most 2 rows, and 4 tiles in all.
        stored: nothing happens unless it is ``TILES``.
    """
    if not all(isinstance(each, types.IntegerLiteral) for each in (num_rows, num_columns)):
        return None
    rows, columns = range(num_rows.literal_value), range(num_columns.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if stored.dtype != types.int64:
            return context.get_dummy_value()
        total_at, left_at, right_at, inputs = arguments[:4]
        total_stride, left_stride, depth_stride, column_stride = cgutils.unpack_tuple(builder, arguments[4])

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
            offset = builder.mul(block, ir.Constant(_INT64, 2 * TILE_INPUTS))
            for row in rows:
                at = builder.add(moved(left_at, left_stride, TILE_SIDE * row), offset)
                move("tileloadd64", _INPUTS[row], at, left_stride)
            first = moved(right_at, depth_stride, block)
            for column in columns:
                weights = _WEIGHTS[column % len(_WEIGHTS)]
                at = moved(first, column_stride, column)
                move("tileloadd64", weights, at, ir.Constant(_INT64, 4 * TILE_SIDE))
                for row in rows:
                    registers = (row * len(columns) + column, _INPUTS[row], weights)
                    _emit(builder, "tdpbf16ps", *(ir.Constant(_BYTE, each) for each in registers))
            return {}

        for register, address in sums.items():
            move("tileloadd64", register, address, total_stride)
        emit_loop(builder, builder.udiv(inputs, ir.Constant(_INT64, TILE_INPUTS)), {}, add)
        for register, address in sums.items():
            move("tilestored64", register, address, total_stride)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, strides, num_rows, num_columns, stored), codegen


def _emit(builder: Any, name: str, *arguments: Any) -> None:
    """Emit one of LLVM's functions for an instruction, whose result is none."""
    function_type = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function_type, _PREFIX + name), arguments)
