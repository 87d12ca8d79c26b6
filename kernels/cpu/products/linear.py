"""Linear layers on the CPU, with weights that are packed once.

The speed of memory limits the decoding of one sequence, and oneDNN reads weights at only half this speed if
there is a single row. Here all weights of a tile are adjacent, in the order in which they are read.

The sum of each output runs over the inputs in order, with fused multiplications. Its bits therefore do not
depend on the number of rows, the number of threads, or the width of vectors.

If the inputs of a layer can be divided among processes, they consist of segments. The sum of each segment
runs in order. These sums are added in pairs, the results again in pairs, and so on (Zhang et al., arXiv
2511.17826). A process with an aligned power of two of the segments computes a subtree of these sums, so the
bits do not depend on the number of processes either.
"""

from __future__ import annotations

import logging
import math
import mmap
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, from_dtype, types  # type: ignore[attr-defined]

from quire.kernels.cpu import threads
from quire.kernels.cpu.intrinsics import (
    CACHE_LINE,
    GROUP,
    STORAGE,
    TILE_COLUMNS,
    call,
    exact,
    fetch_and_increment,
    in_lines,
    keep_apart,
    pointer,
)
from quire.kernels.cpu.kernel_cache import compile_kernel
from quire.kernels.cpu.products.amx_product import (
    AMX_BFLOAT16,
    CHAINS,
    FLOAT32,
    TILE_BYTES,
    TILE_INPUTS,
    TILE_ROW_BYTES,
    TILE_SIDE,
    TILES,
    add_tile_products,
    configure_tiles,
    has_tile_products,
    may_use_tiles,
    release_tiles,
)
from quire.kernels.cpu.products.bfloat16_product import (
    PAIRS,
    flush_denormals,
    prefers_pair_products,
    restore_denormals,
    swap_pairs,
)
from quire.kernels.cpu.products.coded_product import decode, is_coded
from quire.kernels.cpu.products.group_product import is_in_groups
from quire.kernels.cpu.products.integer_product import scale_sums
from quire.kernels.cpu.products.packed_product import (
    AHEAD,
    BY_ROW,
    FEW_ROWS,
    MOST_TILE_ROWS,
    PAIRED,
    add_rows_product,
    add_tile,
    are_halves,
    bytes_per_input,
    input_form,
    operand_bytes,
    panel_bytes,
    quantized_bits,
    row_header,
    widen_panel,
)
from quire.kernels.cpu.products.transposed import HALVES, SWAPPED, WORDS, can_transpose, transpose_panels
from quire.kernels.torch_functions import without_replacements

logger = logging.getLogger(__name__)

Int64s = np.ndarray[Any, np.dtype[np.int64]]

UNIT = 64
"""Output columns that a thread computes at a time; outputs are padded to a multiple of it."""
_PANELS = UNIT // TILE_COLUMNS
_PAIR = min(2, _PANELS)
ROWS = 96
"""Most rows that a thread computes at a time, so that they fit into its cache."""
_PIECE_INPUTS = 384
"""Inputs of a panel that a thread multiplies with all rows before it continues.

For panels of 16 columns, their float32 weights fill 3/4 of an L1 cache of 32 KiB.
"""
_WIDENED_INPUTS = 16 * _PIECE_INPUTS // TILE_COLUMNS
"""Inputs of a panel whose weights are widened at a time, so that the results stay in an L1 cache."""
_DEPTH = 2048
"""Inputs before a thread continues with the next rows, so that the tile's weights fit into its L2 cache."""
_LEAST_HUGE = 1 << 22
"""Bytes of a tensor that has at least one huge page wherever it begins."""
MOST_SEGMENTS = 8
"""Most segments of a layer's inputs: this many processes can divide a sum without changing its bits."""
_MOST_LEVELS = MOST_SEGMENTS.bit_length() - 1
_MIN_THREADED_WORK = 1 << 19
"""With fewer multiplications than this, waking up threads costs more time than it saves."""
_CHUNK_BYTES = 4 * 8
"""Bytes of a chunk of ``multiply_chunks``."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight as ``[out_features / TILE_COLUMNS, in_features, TILE_COLUMNS]``, padded with zeros."""

    panels: torch.Tensor
    out_features: int
    in_features: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight before it was packed."""
        return self.panels.dtype

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return STORAGE[self.panels.dtype]

    @property
    def num_units(self) -> int:
        """How many times ``UNIT`` columns the padded output has."""
        return self.panels.shape[0] // _PANELS

    @property
    def unit_bytes(self) -> int:
        """Bytes of the weights of ``UNIT`` columns."""
        return _PANELS * self.panels[0].nbytes

    @property
    def rounds_inputs(self) -> bool:
        """Whether products round their inputs to 8 bits."""
        return False

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_rows, in_features]`` of the weight's dtype in the form that products read."""
        return rows.float().contiguous()

    def unpack(self) -> torch.Tensor:
        """Return the weight ``[out_features, in_features]``."""
        return self.panels.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        return self.panels[indices // TILE_COLUMNS, :, indices % TILE_COLUMNS]


@dataclass(frozen=True)
class EncodedWeight(PackedWeight):
    """A weight in another form than numbers of its dtype.

    Attributes:
        unpacked_dtype: the dtype of the weight that ``unpack`` returns.
    """

    unpacked_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight when it is unpacked."""
        return self.unpacked_dtype

    def unpack(self) -> torch.Tensor:
        """Return the weight ``[out_features, in_features]``."""
        return self.rows(torch.arange(self.out_features))


class PairedWeight(PackedWeight):
    """A bfloat16 weight in pairs: ``[out_features / TILE_COLUMNS, in_features / 2, TILE_COLUMNS, 2]``."""

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return PAIRS

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_rows, in_features]`` of bfloat16 with swapped pairs."""
        return swap_pairs(rows).contiguous()

    def unpack(self) -> torch.Tensor:
        """Return the weight ``[out_features, in_features]``."""
        return swap_pairs(self.panels.transpose(1, 2).reshape(-1, self.in_features))[: self.out_features]

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        return swap_pairs(self.panels[indices // TILE_COLUMNS, :, indices % TILE_COLUMNS].flatten(-2))


@dataclass(frozen=True)
class TiledWeight(PackedWeight):
    """A bfloat16 weight in tiles, see ``amx_product``.

    Attributes:
        panels: ``[out_features / TILE_COLUMNS, in_features / 32, TILE_COLUMNS / 16, 16, 16, 2]``.
        by_tiles: whether tiles multiply it, or vectors.
    """

    by_tiles: bool

    @property
    def stored(self) -> Any:
        """The NumPy type that represents the weight in Numba."""
        return TILES if self.by_tiles else CHAINS

    def operands(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ``[num_rows, in_features]`` in the form that products read."""
        return (swap_pairs(rows) if self.by_tiles else rows.float()).contiguous()

    def unpack(self) -> torch.Tensor:
        """Return the weight ``[out_features, in_features]``."""
        return self.rows(torch.arange(self.out_features))

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return some rows of the weight, ``[*indices.shape, in_features]``."""
        panel, column = indices // TILE_COLUMNS, indices % TILE_COLUMNS
        pairs = self.panels[panel, :, column // TILE_SIDE, :, column % TILE_SIDE]
        return swap_pairs(pairs.flatten(-3))


def num_padded_panels(out_features: int) -> int:
    """Return the number of panels of a weight whose outputs are padded to whole units."""
    return -(-out_features // UNIT) * _PANELS


Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Function that returns a tensor of a shape and type whose values are not set."""


def in_own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in the process's own memory, in huge pages if it is large and Linux gives them."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without them refuses the advice.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def pack(weight: torch.Tensor, arithmetic: str = FLOAT32, allocate: Allocate = in_own_memory) -> PackedWeight:
    """Pack a weight ``[out_features, in_features]`` of a dtype in ``STORAGE`` with at least 16 bits.

    A bfloat16 weight is packed in pairs if the processor multiplies these fast.

    Args:
        weight: the weight.
        arithmetic: ``FLOAT32`` or ``AMX_BFLOAT16``, the order of sums. The latter needs bfloat16 and whole
            tiles of inputs; weights that differ have the order of ``FLOAT32``.
        allocate: allocates the packed weight.
    """
    out_features, in_features = weight.shape
    is_bfloat16 = weight.dtype == torch.bfloat16
    if arithmetic == AMX_BFLOAT16 and is_bfloat16 and in_features % TILE_INPUTS == 0:
        tiles = _in_tiles(_in_panels(weight), allocate)
        return TiledWeight(tiles, out_features, in_features, tiles_are_exact())
    if is_bfloat16 and in_features % 2 == 0 and prefers_pair_products():
        pairs = _in_panels(weight, allocate, in_pairs=True).view(-1, in_features // 2, TILE_COLUMNS, 2)
        return PairedWeight(pairs, out_features, in_features)
    return PackedWeight(_in_panels(weight, allocate), out_features, in_features)


def _in_panels(
    weight: torch.Tensor, allocate: Allocate = in_own_memory, *, in_pairs: bool = False
) -> torch.Tensor:
    """Return a weight as ``[num_panels, in_features, TILE_COLUMNS]``, with zeros at the end.

    Args:
        in_pairs: whether each two values of a column lie together, with the second one first.
    """
    out_features, in_features = weight.shape
    num_whole = out_features // TILE_COLUMNS
    panels = allocate((num_padded_panels(out_features), in_features, TILE_COLUMNS), weight.dtype)
    panels[num_whole:] = 0
    rest = weight[num_whole * TILE_COLUMNS :]
    rest = torch.nn.functional.pad(rest, (0, 0, 0, -len(rest) % TILE_COLUMNS))
    for part, target in ((weight[: num_whole * TILE_COLUMNS], panels), (rest, panels[num_whole:])):
        if can_transpose(in_features, weight.itemsize):
            order = WORDS if weight.itemsize == 4 else SWAPPED if in_pairs else HALVES
            transpose_panels(part, target, order)
        else:
            _transpose_slowly(part.view(-1, TILE_COLUMNS, in_features), target, in_pairs)
    return panels


def _transpose_slowly(weight: torch.Tensor, panels: torch.Tensor, in_pairs: bool) -> None:
    """Write whole panels of a weight of any size."""
    values = weight.transpose(1, 2)
    if in_pairs:
        values = values.unflatten(1, (-1, 2)).flip(2).transpose(2, 3)
    panels[: len(weight)] = values.reshape(-1, *panels.shape[1:])


def _in_tiles(panels: torch.Tensor, allocate: Allocate = in_own_memory) -> torch.Tensor:
    shape = (len(panels), -1, TILE_SIDE, 2, TILE_COLUMNS // TILE_SIDE, TILE_SIDE)
    tiles = panels.view(shape).flip(3).permute(0, 1, 4, 2, 5, 3)
    return allocate(tuple(tiles.shape), tiles.dtype).copy_(tiles)


@cache
def tiles_are_exact() -> bool:
    """Return whether this process may use tiles, and their products have the bits of vectors.

    The order of sums is known from Intel's manual. This shows that the present processor keeps to it.
    """
    if not may_use_tiles():
        return False
    random, shape = np.random.Generator(np.random.PCG64(0)), (2 * TILE_SIDE + 1 + UNIT, 4 * TILE_INPUTS)
    # Some of the values and of their products are denormal.
    values = torch.from_numpy(random.standard_normal(shape) * 2.0 ** random.integers(-140, 20, shape))
    inputs, weight = values.bfloat16().split([2 * TILE_SIDE + 1, UNIT])
    tiles = TiledWeight(_in_tiles(_in_panels(weight)), UNIT, shape[1], by_tiles=True)
    return have_same_sums(inputs, tiles, replace(tiles, by_tiles=False))


def have_same_sums(inputs: torch.Tensor, tiles: PackedWeight, vectors: PackedWeight) -> bool:
    """Return whether sums by tiles have the bits of sums by vectors; if not, log it.

    Args:
        inputs: rows for more than two rows of tiles.
        tiles, vectors: the same weight, for products by tiles and by vectors.
    """
    for num_rows in (1, TILE_SIDE + 1, 2 * TILE_SIDE + 1):
        if not torch.equal(sums(inputs[:num_rows], tiles, None), sums(inputs[:num_rows], vectors, None)):
            logger.warning(
                "the AMX tiles of this processor do not round as its manual says, so prompts are slower"
            )
            return False
    return True


_FIELDS = (
    "inputs",
    "chunks",
    "output",
    "next_unit",
    "num_chunks",
    "in_features",
    "first_input",
    "num_inputs",
    "num_segments",
    "input_stride",
    "output_stride",
    "num_units",
    "head_stride",
    "units_per_head",
    "multiply",
)
_ARGUMENTS = np.dtype([(name, np.int64) for name in _FIELDS])
_PACKED = Struct(f"{len(_FIELDS)}q")
"""Packs the arguments, in a quarter of the time of an array of NumPy."""


@without_replacements
def linear(
    inputs: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, num_segments: int = 1
) -> torch.Tensor:
    """Return ``inputs @ weight.T + bias``.

    Args:
        inputs: ``[..., in_features]``, in the dtype of the weight.
        weight: the packed weight.
        bias: float32 ``[num_units * UNIT]``.
        num_segments: equal segments of inputs that are summed separately, see ``num_segments_of``.
    """
    result = sums(inputs, weight, bias, num_segments)
    if result.shape[1] != weight.out_features:
        result = result[:, : weight.out_features]
    return result.to(inputs.dtype).view(*inputs.shape[:-1], weight.out_features)


def sums(
    inputs: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    num_segments: int = 1,
    own_inputs: range | None = None,
    num_heads: int = 1,
) -> torch.Tensor:
    """Return the result of ``linear`` before it is rounded: float32 ``[num_rows, num_units * UNIT]``.

    Args:
        own_inputs: the inputs to sum, which have ``num_segments`` segments; None means all inputs.
        num_heads: number of equal parts of the units; each multiplies inputs of its own, so the inputs are
            ``[num_rows, num_heads, in_features]``.
    """
    rows = weight.operands(inputs.reshape(-1, weight.in_features))
    weight_at, bias_at = weight.panels.data_ptr(), 0 if bias is None else bias.data_ptr()
    num_rows = rows.shape[0] // num_heads
    chunks = array("q")
    for first in range(0, num_rows, ROWS):
        chunks.extend((first, min(ROWS, num_rows - first), weight_at, bias_at))
    num_chunks = len(chunks) // 4
    chunks.append(0)
    address = chunks.buffer_info()[0]
    return multiply_chunks(rows, address, num_chunks, weight, num_segments, own_inputs, num_heads)


def multiply_chunks(
    rows: torch.Tensor,
    chunks_at: int,
    num_chunks: int,
    weight: PackedWeight,
    num_segments: int = 1,
    own_inputs: range | None = None,
    num_heads: int = 1,
) -> torch.Tensor:
    """Multiply chunks of rows by packed weights of one shape and type, see ``sums``.

    Args:
        rows: what ``weight.operands`` returned.
        chunks_at: address of int64 ``[num_chunks, 4]``: for each chunk its first row, the number of its rows,
            which is at most ``ROWS``, and the addresses of its weight and its bias, or 0. A zero follows,
            with which threads count the units that they take.
        weight: one of the weights.
        num_segments, own_inputs, num_heads: as for ``sums``.
    """
    own, num_units = own_inputs or range(weight.in_features), weight.num_units
    (num_operands, row_size), width = rows.shape, num_units * UNIT
    row_bytes = rows.itemsize * row_size
    output = torch.empty((num_operands // num_heads, width))
    arguments = (
        rows.data_ptr(),
        chunks_at,
        output.data_ptr(),
        chunks_at + _CHUNK_BYTES * num_chunks,
        num_chunks,
        weight.in_features,
        own.start,
        len(own),
        num_segments,
        num_heads * row_bytes,
        width,
        num_units,
        row_bytes,
        num_units // num_heads,
        unit_kernel(weight.stored).address,
    )
    is_threaded = num_operands // num_heads * width * len(own) >= _MIN_THREADED_WORK
    num_threads = torch.get_num_threads() if is_threaded else 1
    threads.run(_kernel().address, _PACKED.pack(*arguments), num_threads)
    return output


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
    for panel in range(_PANELS):
        _clear_sums(product, panel, 0, product.num_rows)
    if by_tiles:
        _add_by_tiles(product, stored)
    else:
        _add_few_rows(product, stored)
    for panel in range(_PANELS):
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
    for panel in range(_PANELS):
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
    if _PANELS > 1:
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
        add_rows_product(total, left, right, count, no_fetch, strides, 1, _PANELS, stored)
        return
    for panel in range(0, _PANELS, _PAIR):
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
            + unit * _PANELS * panel_bytes(in_features, stored)
            + bytes_per_input(stored) * first_input,
            in_features,
            num_inputs,
            output,
            output_stride,
            num_rows,
        )
        multiply_unit(product, num_segments, bias + 4 * unit * UNIT if bias else 0, stored)

    signature = types.void(*[types.int64] * len(UnitCall._fields))
    return compile_kernel(signature, multiply, error_model="numpy")


@cache
def _kernel() -> Any:
    """Compile the function that each thread runs: it takes the next unit until none is left."""

    def kernel(arguments: Any) -> None:
        args = carray(arguments, 1)[0]
        chunks = carray(pointer(args.chunks, np.int64), (args.num_chunks, 4))
        while True:
            program = np.int64(fetch_and_increment(args.next_unit))
            if program >= args.num_units * args.num_chunks:
                break
            unit, chunk = program // args.num_chunks, program % args.num_chunks
            first = chunks[chunk, 0]
            unit_call = UnitCall(
                args.inputs + first * args.input_stride + unit // args.units_per_head * args.head_stride,
                args.input_stride,
                chunks[chunk, 2],
                args.in_features,
                unit,
                args.first_input,
                args.num_inputs,
                args.output + 4 * (first * args.output_stride + unit * UNIT),
                args.output_stride,
                chunks[chunk, 1],
                args.num_segments,
                chunks[chunk, 3],
            )
            call(args.multiply, unit_call)

    signature = types.void(types.CPointer(from_dtype(_ARGUMENTS)))
    return compile_kernel(signature, kernel, error_model="numpy")
