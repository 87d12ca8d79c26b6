"""The types that stand for packed weights: their bytes, and the form of the inputs that multiply them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types

from quire.kernels.cpu.intrinsics import GROUP, TILE_COLUMNS, constant_of, exact
from quire.kernels.cpu.products.bfloat16_product import PAIRS
from quire.kernels.cpu.products.coded_product import CODINGS
from quire.kernels.cpu.products.group_product import GROUP_CODINGS, NIBBLES, OPERAND_BYTES
from quire.kernels.cpu.products.integer_product import INPUT_BYTES, INTEGERS, PANEL_TRAILER, ROW_HEADER

SCALE_BYTES = 2
BITS = {types.int8: 8, types.uint8: 4}
"""Bits of a quantized weight, by the Numba type of a value of ``quantized_weight.QUANTIZED``."""
HALVES = (types.uint16, types.int16)
"""The Numba types of numbers of 16 bits."""
PAIR_TYPE = types.uint32
"""The Numba type of ``bfloat16_product.PAIRS``."""
INTEGER_TYPE = types.int32
"""The Numba type of ``integer_product.INTEGERS``."""
CHAIN_TYPE, TILE_TYPE, INTEGER_TILE_TYPE = types.uint64, types.int64, types.complex64
"""The Numba types of ``amx_product.CHAINS``, ``TILES`` and ``INTEGER_TILES``."""
FLOATS, PAIRED, BY_ROW, BY_GROUP = range(4)
"""Forms of a row of inputs: float32, pairs of bfloat16, and integers with a scale for all or for a group."""
_FORMS = {
    PAIR_TYPE: PAIRED,
    TILE_TYPE: PAIRED,
    INTEGER_TYPE: BY_ROW,
    INTEGER_TILE_TYPE: BY_ROW,
    **dict.fromkeys(GROUP_CODINGS, BY_GROUP),
}
"""Form of the inputs that are multiplied with weights of a type, unless it is ``FLOATS``."""
_GROUP_BYTES = (4 * GROUP, 2 * GROUP, INPUT_BYTES * GROUP, OPERAND_BYTES)
"""Bytes of ``GROUP`` inputs, by their form."""
WEIGHT_BYTES = {PAIR_TYPE: 2, CHAIN_TYPE: 2, TILE_TYPE: 2, INTEGER_TYPE: 1, INTEGER_TILE_TYPE: 1}
"""Bytes of a weight whose Numba type stands for another type."""


def group_bytes(bits: int) -> int:
    """Return the bytes of a group of one panel, with its scales."""
    return TILE_COLUMNS * (GROUP * bits // 8 + SCALE_BYTES)


quantized_bits = constant_of(types.int64, lambda stored: BITS.get(stored, 0))
"""Bits of each integer of quantized weights, in a kernel; 0 if they are not quantized."""


def _bytes_per_input(stored: Any) -> int:
    if stored in BITS:
        return group_bytes(BITS[stored]) // GROUP
    if (coding := CODINGS.get(stored) or GROUP_CODINGS.get(stored)) is not None:
        return int(coding.group_bytes) // GROUP
    if stored in WEIGHT_BYTES:
        return TILE_COLUMNS * WEIGHT_BYTES[stored]
    return int(TILE_COLUMNS * stored.bitwidth // 8)


bytes_per_input = constant_of(types.int64, _bytes_per_input)
"""A panel's bytes per input, in a kernel. If it has groups or tiles, multiply this only by whole ones."""


are_halves = constant_of(types.boolean, lambda stored: stored in HALVES)
"""Whether weights are single numbers of 16 bits, in a kernel."""


def form_of_inputs(stored: Any) -> int:
    """Return the form in which products with weights of a NumPy type read their inputs."""
    return _FORMS.get(from_dtype(np.dtype(stored)), FLOATS)


def first_of_form(stored: Any) -> Any:
    """Return the NumPy type that stands for all weights whose inputs have the same form."""
    return (np.float32, PAIRS, INTEGERS, NIBBLES)[form_of_inputs(stored)]


input_form = constant_of(types.int64, lambda stored: _FORMS.get(stored, FLOATS))
"""``form_of_inputs``, in a kernel."""


@exact
def operand_bytes(num_inputs: int, stored: Any) -> int:
    """Return the bytes of some inputs, which are whole groups if these have scales, in their form."""
    num_bytes: int = num_inputs * _GROUP_BYTES[input_form(stored)] // GROUP
    return num_bytes


@exact
def row_bytes(length: int, stored: Any) -> int:
    """Return the bytes of a row of inputs in the form in which products with these weights read it."""
    num_bytes: int = operand_bytes(length, stored) + row_header(stored)
    return num_bytes


@exact
def row_header(stored: Any) -> int:
    """Return the bytes before the first input of a row."""
    return ROW_HEADER if input_form(stored) == BY_ROW else 0


@exact
def panel_bytes(in_features: int, stored: Any) -> int:
    """Return the bytes of a panel."""
    num_bytes: int = in_features * bytes_per_input(stored)
    return num_bytes + PANEL_TRAILER if input_form(stored) == BY_ROW else num_bytes


are_tiles = constant_of(types.boolean, lambda stored: stored in (CHAIN_TYPE, TILE_TYPE))
"""Whether weights are in tiles of bfloat16, in a kernel."""
