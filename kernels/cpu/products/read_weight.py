"""Reads one weight of a packed panel, of any type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import GROUP, TILE_COLUMNS, exact, instruction, pointer, widen, widened
from quire.kernels.cpu.products.amx_product import TILE_BYTES, TILE_INPUTS, TILE_SIDE
from quire.kernels.cpu.products.coded_product import CODINGS, is_coded, place_in_word, read_code
from quire.kernels.cpu.products.group_product import GROUP_CODINGS, is_in_groups, read_in_groups
from quire.kernels.cpu.products.integer_product import INPUTS
from quire.kernels.cpu.products.stored_types import (
    BITS,
    BY_ROW,
    PAIRED,
    WEIGHT_BYTES,
    are_tiles,
    bytes_per_input,
    input_form,
    quantized_bits,
)


@instruction
def _read_plain(typingctx: Any, panel: Any, position: Any, stored: Any) -> Any:
    """Return the weight at a position of a panel that is not quantized, as float32."""
    element = {1: types.int8, 2: types.uint16}.get(WEIGHT_BYTES.get(stored.dtype, 0), stored.dtype)
    if any(stored.dtype in each for each in (BITS, CODINGS, GROUP_CODINGS)):
        element = types.int8  # never read, but compiled

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights = builder.inttoptr(arguments[0], context.get_value_type(element).as_pointer())
        return widened(builder, element, builder.load(builder.gep(weights, [arguments[1]])))

    return types.float32(types.int64, types.int64, stored), codegen


@exact
def _place_in_pairs(index: int, column: int, stored: Any) -> int:
    """Return the position of a bfloat16 weight in its panel; the earlier input of a pair is the second."""
    pair = index // 2 * TILE_COLUMNS + column
    if are_tiles(stored):
        block, tile = index // TILE_INPUTS, column // TILE_SIDE
        first = (block * (TILE_COLUMNS // TILE_SIDE) + tile) * (TILE_BYTES // 4)
        pair = first + index % TILE_INPUTS // 2 * TILE_SIDE + column % TILE_SIDE
    place: int = 2 * pair + 1 - index % 2
    return place


@exact
def read_weight(panel: int, index: int, column: int, in_features: int, stored: Any) -> np.float32:
    """Return the weight of one input and one column of the panel at an address, as float32."""
    if is_coded(stored):
        group = panel + index // GROUP * GROUP * bytes_per_input(stored)
        coded: np.float32 = read_code(group, index % GROUP, column, stored)
        return coded
    if is_in_groups(stored):
        group = panel + index // GROUP * GROUP * bytes_per_input(stored)
        in_group: np.float32 = read_in_groups(group, index % GROUP, column, stored)
        return in_group
    bits = quantized_bits(stored)
    if bits == 0:
        position = index * TILE_COLUMNS + column
        if input_form(stored) == PAIRED or are_tiles(stored):
            position = _place_in_pairs(index, column, stored)
        if input_form(stored) == BY_ROW:
            position = (index // INPUTS * TILE_COLUMNS + column) * INPUTS + index % INPUTS
        weight: np.float32 = _read_plain(panel, position, stored)
        if input_form(stored) == BY_ROW:
            ends = carray(pointer(panel + in_features * bytes_per_input(stored), np.float32), (TILE_COLUMNS,))
            weight *= ends[column]
        return weight
    per_word = 32 // bits
    start = panel + index // GROUP * GROUP * bytes_per_input(stored)
    words = carray(pointer(start, np.int32), (GROUP // per_word, TILE_COLUMNS))
    word = np.int64(words[index % GROUP // per_word, column])
    place = place_in_word(index % per_word, bits)
    integer = word >> bits * place << 64 - bits >> 64 - bits
    scales_at = start + 4 * (GROUP // per_word) * TILE_COLUMNS
    scale = widen(carray(pointer(scales_at, np.uint16), (TILE_COLUMNS,))[column])
    dequantized: np.float32 = np.float32(integer) * (scale * np.float32(1 << 32 - bits))
    return dequantized
