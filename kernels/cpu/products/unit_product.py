"""Products of some rows and of a unit of columns of a packed weight.

The sum of each output runs over the inputs in order, with fused multiplications. Its bits therefore do not
depend on the number of rows, the number of threads, or the width of vectors.

If the inputs of a layer can be divided among processes, they consist of segments. The sum of each segment
runs in order. These sums are added in pairs, the results again in pairs, and so on (Zhang et al., arXiv
2511.17826). A process with an aligned power of two of the segments computes a subtree of these sums, so the
bits do not depend on the number of processes either.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import (
    CACHE_LINE,
    GROUP,
    TILE_COLUMNS,
    exact,
    in_lines,
    keep_apart,
    pointer,
)
from quire.kernels.cpu.kernel_cache import compile_function
from quire.kernels.cpu.products.amx_product import (
    TILE_BYTES,
    TILE_ROW_BYTES,
    TILE_SIDE,
    add_tile_products,
    configure_tiles,
    has_tile_products,
    release_tiles,
)
from quire.kernels.cpu.products.bfloat16_product import flush_denormals, restore_denormals
from quire.kernels.cpu.products.coded_product import decode, is_coded
from quire.kernels.cpu.products.group_product import is_in_groups
from quire.kernels.cpu.products.integer_product import scale_sums
from quire.kernels.cpu.products.packed_product import (
    AHEAD,
    FEW_ROWS,
    MOST_TILE_ROWS,
    add_rows_product,
    add_tile,
    widen_panel,
)
from quire.kernels.cpu.products.packed_weight import UNIT, UNIT_PANELS
from quire.kernels.cpu.products.stored_types import (
    BY_ROW,
    PAIRED,
    are_halves,
    bytes_per_input,
    input_form,
    operand_bytes,
    panel_bytes,
    quantized_bits,
    row_header,
)

ROWS = 96
"""Most rows that a thread computes at a time, so that they fit into its cache."""
_PAIR = min(2, UNIT_PANELS)
_PIECE_INPUTS = 384
"""Inputs of a panel that a thread multiplies with all rows before it continues.

For panels of 16 columns, their float32 weights fill 3/4 of an L1 cache of 32 KiB.
"""
_WIDENED_INPUTS = 16 * _PIECE_INPUTS // TILE_COLUMNS
"""Inputs of a panel whose weights are widened at a time, so that the results stay in an L1 cache."""
_DEPTH = 2048
"""Inputs before a thread continues with the next rows, so that the tile's weights fit into its L2 cache."""
MOST_SEGMENTS = 8
"""Most segments of a layer's inputs: this many processes can divide a sum without changing its bits."""
_MOST_LEVELS = MOST_SEGMENTS.bit_length() - 1


def num_segments_of(in_features: int, num_parts: int) -> int:
    """Return the number of segments of a layer's inputs: a power of two, at most ``MOST_SEGMENTS``.

    It depends on the model only. No segment begins inside a part, or inside a group of quantized weights.

    Args:
        in_features: number of inputs.
        num_parts: number of equal parts of the inputs, such as attention heads, that no segment may split.
    """
    count = MOST_SEGMENTS
    while count > 1 and (num_parts % count or in_features // count % GROUP):
        count //= 2
    return count


class Product(NamedTuple):
    """Up to ``ROWS`` rows of inputs, multiplied by ``UNIT`` columns of a packed weight.

    Attributes:
        inputs, weight, output: addresses of the first row, of the unit's weights and of its first output,
            which is float32. Inputs have the ``input_form`` of the weight.
        input_stride, output_stride: bytes from one row of inputs to the next, and elements from one row of
            outputs to the next.
        in_features: inputs of the layer.
        num_inputs: number of inputs to sum, beginning at the addresses.
    """

    inputs: int
    input_stride: int
    weight: int
    in_features: int
    num_inputs: int
    output: int
    output_stride: int
    num_rows: int


@exact
def place_of(program: int, num_rows: int) -> tuple[int, int]:
    """Return the unit and the first row that a program computes.

    Programs of one unit are neighbours, so that its weights stay in a cache while they multiply all rows.
    """
    num_chunks = -(-num_rows // ROWS)
    return program // num_chunks, program % num_chunks * ROWS


@exact
def multiply_unit(product: Product, num_segments: int, bias: int, stored: Any) -> None:
    """Compute the outputs of a product.

    Args:
        num_segments: equal segments of inputs that are summed separately, a power of two.
        bias: address of the unit's float32 bias; 0 if there is none.
        stored: the NumPy type of the weight, in ``STORAGE`` or ``QUANTIZED``.
    """
    keep_apart()
    register = flush_denormals(stored)
    # The sums of integers are exact, so segments do not matter.
    if num_segments == 1 or input_form(stored) == BY_ROW:
        _sum_inputs(product, stored)
    else:
        _sum_segments(product, num_segments, stored)
    if bias != 0:
        outputs = carray(pointer(product.output, np.float32), (product.num_rows, product.output_stride))
        addends = carray(pointer(bias, np.float32), (UNIT,))
        for row in range(product.num_rows):
            for column in range(UNIT):
                outputs[row, column] += addends[column]
    restore_denormals(register, stored)


@exact
def _sum_segments(product: Product, num_segments: int, stored: Any) -> None:
    """Compute sums without a bias as a binary tree over segments of inputs.

    Level ``l`` contains a sum of ``2 ** l`` segments, to which the next sum of this size will be added. The
    last level is the output.
    """
    keep_apart()
    depth, num_rows = product.num_inputs // num_segments, product.num_rows
    levels = np.empty((_MOST_LEVELS, num_rows, UNIT), np.float32)
    for segment in range(num_segments):
        num_waiting = 0
        while segment >> num_waiting & 1:
            num_waiting += 1
        target: Any = np.int64(product.output)
        stride: Any = np.int64(product.output_stride)
        if segment < num_segments - 1:
            target, stride = np.int64(levels[num_waiting].ctypes.data), np.int64(UNIT)
        of_segment = Product(
            product.inputs + operand_bytes(segment * depth, stored),
            product.input_stride,
            product.weight + bytes_per_input(stored) * segment * depth,
            product.in_features,
            depth,
            target,
            stride,
            num_rows,
        )
        _sum_inputs(of_segment, stored)
        totals = carray(pointer(target, np.float32), (num_rows, stride))
        for level in range(num_waiting):
            for row in range(num_rows):
                for column in range(UNIT):
                    totals[row, column] += levels[level, row, column]


@exact
def _sum_inputs(product: Product, stored: Any) -> None:
    """Compute sums without a bias over the first ``num_inputs`` inputs, in the order of the arithmetic."""
    # The sums of integers are exact, so a few rows may take the vectors, which read weights in order.
    by_tiles = has_tile_products(stored) and (product.num_rows > FEW_ROWS or input_form(stored) == PAIRED)
    if not by_tiles and product.num_rows > FEW_ROWS:
        _compute_tiles(product, stored)
        return
    for panel in range(UNIT_PANELS):
        _clear_sums(product, panel, 0, product.num_rows)
    if by_tiles:
        _add_by_tiles(product, stored)
    else:
        _add_few_rows(product, stored)
    for panel in range(UNIT_PANELS):
        _scale_integers(product, panel, 0, product.num_rows, stored)


@exact
def _clear_sums(product: Product, panel: int, first_row: int, end_row: int) -> None:
    """Set the sums of some rows and of a panel's columns to zero."""
    outputs = carray(pointer(product.output, np.float32), (product.num_rows, product.output_stride))
    for row in range(first_row, end_row):
        for column in range(TILE_COLUMNS):
            outputs[row, panel * TILE_COLUMNS + column] = 0.0


@exact
def _scale_integers(product: Product, panel: int, first_row: int, end_row: int, stored: Any) -> None:
    """Replace sums of integers by products, if the weights are integers."""
    if input_form(stored) == BY_ROW:
        stride = panel_bytes(product.in_features, stored)
        scale_sums(
            product.inputs + first_row * product.input_stride,
            product.input_stride,
            product.weight + panel * stride + product.in_features * bytes_per_input(stored),
            product.output + 4 * (first_row * product.output_stride + panel * TILE_COLUMNS),
            product.output_stride,
            end_row - first_row,
        )


@exact
def _compute_tiles(product: Product, stored: Any) -> None:
    """Compute the products of rows in tiles of one panel; the tiles' numbers of rows differ by at most one.

    Many tiles multiply the same piece of a panel, which is in the L1 cache, and meanwhile prefetch the next
    piece. Weights are thus read from memory during all products, and not only during those of the first tile.
    Codes and numbers of 16 bits are widened once for all tiles of a piece. Otherwise each tile prefetches the
    weights that it widens. The sums of a tile are cleared and scaled while they are in the cache.
    """
    inputs, input_stride, weight, in_features, num_inputs, output, output_stride, num_rows = product
    input_bytes = bytes_per_input(stored)
    stride = panel_bytes(in_features, stored)
    strides = (np.int64(output_stride), np.int64(input_stride), np.int64(stride))
    first_input = inputs + row_header(stored)
    num_tiles = -(-num_rows // MOST_TILE_ROWS)
    widens = is_coded(stored) or (are_halves(stored) and num_tiles > 2)
    fetches_next_piece = num_tiles > 2 and (widens or input_bytes == 4 * TILE_COLUMNS)
    # A few rows read the weights once, from memory. Many rows read them several times, from a cache.
    step = _PIECE_INPUTS if fetches_next_piece else _DEPTH if num_tiles > 2 else num_inputs
    wide = np.empty(0, np.float32)
    if widens:
        step = _WIDENED_INPUTS
        wide = np.empty(_WIDENED_INPUTS * TILE_COLUMNS + CACHE_LINE, np.float32)
    for panel in range(UNIT_PANELS):
        for start in range(0, num_inputs, step):
            count = np.int64(min(step, num_inputs - start))
            piece = np.int64(weight + panel * stride + start * input_bytes)
            right = piece
            if widens:
                right = np.int64(in_lines(wide, (1,), np.float32).ctypes.data)
                decode(piece, count, right, stored)
                widen_panel(piece, count, right, stored)
            for tile in range(num_tiles):
                first, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
                total = np.int64(output + 4 * (first * output_stride + panel * TILE_COLUMNS))
                left = np.int64(first_input + first * input_stride + operand_bytes(start, stored))
                fetch = (np.int64(right + AHEAD * input_bytes), np.int64(input_bytes))
                if fetches_next_piece:
                    share = -(-input_bytes // num_tiles)
                    fetch = (np.int64(piece + count * (input_bytes + tile * share)), np.int64(share))
                if start == 0:
                    _clear_sums(product, panel, first, end)
                if widens:
                    add_tile(end - first, total, left, right, count, fetch, strides, np.float32)
                else:
                    add_tile(end - first, total, left, right, count, fetch, strides, stored)
                if start + count == num_inputs:
                    _scale_integers(product, panel, first, end, stored)


@exact
def _add_by_tiles(product: Product, stored: Any) -> None:
    """Add the products of rows by AMX tiles: two rows of two tiles at a time, or one row of four."""
    inputs, input_stride, weight, in_features, num_inputs, output, output_stride, num_rows = product
    num_bytes = operand_bytes(num_inputs, stored)
    row_bytes = np.int64(TILE_ROW_BYTES if num_bytes % TILE_ROW_BYTES == 0 else TILE_ROW_BYTES // 2)
    tile_inputs = num_inputs * row_bytes // num_bytes
    # Tiles of bfloat16 are stored one by one, those of integers are parts of the rows of a panel.
    is_apart = input_form(stored) == PAIRED
    column_stride = TILE_BYTES if is_apart else TILE_ROW_BYTES
    if UNIT_PANELS > 1:
        column_stride = panel_bytes(in_features, stored)
    strides = (
        np.int64(4 * output_stride),
        np.int64(input_stride),
        row_bytes,
        np.int64(tile_inputs * bytes_per_input(stored)),
        np.int64(column_stride),
        np.int64(TILE_ROW_BYTES if is_apart else 4 * TILE_COLUMNS),
    )
    for start in range(0, num_inputs, _DEPTH):
        num_tiles = np.int64(min(_DEPTH, num_inputs - start) // tile_inputs)
        right = np.int64(weight + start * bytes_per_input(stored))
        for row in range(0, num_rows, 2 * TILE_SIDE):
            total = np.int64(output + 4 * row * output_stride)
            left = inputs + row_header(stored) + row * input_stride + operand_bytes(start, stored)
            first = np.int64(min(TILE_SIDE, num_rows - row))
            second = np.int64(min(TILE_SIDE, num_rows - row - TILE_SIDE))
            if second > 0:
                configure_tiles(first, second, row_bytes, stored)
                add_tile_products(total, np.int64(left), right, num_tiles, strides, 2, 2, stored)
                total += 4 * 2 * TILE_SIDE
                right_half = right + 2 * column_stride
                add_tile_products(total, np.int64(left), right_half, num_tiles, strides, 2, 2, stored)
            else:
                configure_tiles(first, first, row_bytes, stored)
                add_tile_products(total, np.int64(left), right, num_tiles, strides, 1, 4, stored)
    release_tiles(stored)


@exact
def _add_few_rows(product: Product, stored: Any) -> None:
    """Add the products of one or two rows, in tiles of several panels."""
    inputs, input_stride, weight, in_features, num_inputs, output, output_stride, num_rows = product
    stride = panel_bytes(in_features, stored)
    strides = (np.int64(output_stride), np.int64(input_stride), np.int64(stride))
    left, count = np.int64(inputs + row_header(stored)), np.int64(num_inputs)
    no_fetch = (np.int64(0), np.int64(0))
    # The sums of one row leave enough registers for four panels of floats, but only for two of others.
    if num_rows == 1 and quantized_bits(stored) == 0 and not is_coded(stored) and not is_in_groups(stored):
        total, right = np.int64(output), np.int64(weight)
        add_rows_product(total, left, right, count, no_fetch, strides, 1, UNIT_PANELS, stored)
        return
    for panel in range(0, UNIT_PANELS, _PAIR):
        total = np.int64(output + 4 * panel * TILE_COLUMNS)
        right = np.int64(weight + panel * stride)
        if num_rows == 1:
            add_rows_product(total, left, right, count, no_fetch, strides, 1, _PAIR, stored)
        else:
            add_rows_product(total, left, right, count, no_fetch, strides, 2, _PAIR, stored)


class UnitCall(NamedTuple):
    """The arguments of a ``unit_kernel``, in their order; the names have the meaning that ``Product`` gives.

    Attributes:
        weight: address of the packed weight.
        unit: index of the unit of columns to compute.
        first_input: the first input to sum.
        num_segments: see ``multiply_unit``.
        bias: address of the layer's float32 bias; 0 if there is none.
    """

    inputs: int
    input_stride: int
    weight: int
    in_features: int
    unit: int
    first_input: int
    num_inputs: int
    output: int
    output_stride: int
    num_rows: int
    num_segments: int
    bias: int


@cache
def unit_kernel(stored: Any) -> Any:
    """Compile the function that computes a unit of columns of a weight.

    Programs call it at its address, so one program multiplies weights of several types.

    Args:
        stored: the NumPy type of the weight, in ``STORAGE`` or ``QUANTIZED``.
    """

    def multiply(
        inputs: int,
        input_stride: int,
        weight: int,
        in_features: int,
        unit: int,
        first_input: int,
        num_inputs: int,
        output: int,
        output_stride: int,
        num_rows: int,
        num_segments: int,
        bias: int,
    ) -> None:
        product = Product(
            inputs + operand_bytes(first_input, stored),
            input_stride,
            weight
            + unit * UNIT_PANELS * panel_bytes(in_features, stored)
            + bytes_per_input(stored) * first_input,
            in_features,
            num_inputs,
            output,
            output_stride,
            num_rows,
        )
        multiply_unit(product, num_segments, bias + 4 * unit * UNIT if bias else 0, stored)

    signature = types.void(*[types.int64] * len(UnitCall._fields))
    return compile_function(signature, multiply)
