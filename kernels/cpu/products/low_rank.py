"""Updates of low rank for linear layers: each row of a step may have those of another adapter, or none.

A linear layer gives ``y = W x``, rounded to the model's dtype, and an adapter makes that ``y + scale * B (A
x)``, rounded again. Sums run in order with fused multiplications, as those of ``linear``. A row's bits
therefore do not depend on the other rows or on their adapters, and a row without one has those of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from quire.kernels.cpu.intrinsics import add_product, exact, keep_apart, pointer
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.rows import narrow

LANES = 8
"""Ranks are padded to a multiple of this."""
_TILE_ROWS = 4
_TILE_COLUMNS = 16
_COMING_BYTES = 128
"""Bytes of the next row's B that are prefetched with each row of B: as many as it has in 16 bits."""

LINEARS = ("query", "key", "value", "output", "gate", "up", "down")
"""The linear layers of a layer of the model, in the order of their updates."""
SLOTS = 3
"""Most linear layers that have the same inputs."""
UPDATE = np.dtype([*((name, np.int64) for name in ("a", "b", "in_features", "rank")), ("scale", np.float64)])
"""An update: addresses of ``pack_a`` and ``pack_b``, and the padded rank; 0 if there is none."""
ADAPTED = np.dtype(
    [(name, np.int64) for name in ("num_rows", "rows", "updates", "sums", "max_rank", "item_bytes")]
)
"""The rows of a step that have adapters.

``rows`` are their ``num_rows`` indices, sorted by adapter. ``updates`` are for each row of the step the
address of its adapter's updates, or 0. ``sums`` are float32 ``[num_tokens, SLOTS, max_rank]``. ``max_rank``
is 0 if no row of a whole step has an adapter.
"""


def pack_a(weight: torch.Tensor) -> torch.Tensor:
    """Return A ``[rank, in_features]`` as ``[in_features, padded rank]``."""
    return torch.nn.functional.pad(weight.T, (0, -len(weight) % LANES)).contiguous()


def pack_b(weight: torch.Tensor) -> torch.Tensor:
    """Return B ``[out_features, rank]`` as ``[num_units, padded rank, UNIT]``."""
    out_features, rank = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -rank % LANES, 0, -out_features % UNIT))
    return padded.view(-1, UNIT, padded.shape[1]).transpose(1, 2).contiguous()


@exact
def _update(adapted: Any, row: int, index: int) -> Any:
    """Return the update of a linear layer, by its index in the model, for a row that has an adapter."""
    updates = carray(pointer(adapted.updates, np.int64), (row + 1,))
    return carray(pointer(updates[row], UPDATE), (index + 1,))[index]


@exact
def _num_alike(adapted: Any, rows: Any, at: int, end: int) -> int:
    """Return ``_TILE_ROWS`` if as many rows from ``rows[at]`` are adjacent and have one adapter, else 1."""
    if at + _TILE_ROWS > end or rows[at + _TILE_ROWS - 1] != rows[at] + _TILE_ROWS - 1:
        return 1
    updates = carray(pointer(adapted.updates, np.int64), (rows[at] + _TILE_ROWS,))
    # Equal adapters have ascending rows, so all rows between these two have the same one.
    return _TILE_ROWS if updates[rows[at]] == updates[rows[at] + _TILE_ROWS - 1] else 1


@exact
def _add_tile(
    total: int, left: int, right: int, depth: int, strides: Any, num_rows: int, columns: int, storage: Any
) -> None:
    """Add a product of 1 or ``_TILE_ROWS`` rows and ``LANES`` or ``_TILE_COLUMNS`` columns."""
    one, none = np.float32(1.0), (np.int64(0), np.int64(0))
    if num_rows == 1 and columns == LANES:
        add_product(total, left, right, depth, strides, one, none, 1, LANES, storage, 0)
    elif num_rows == 1:
        add_product(total, left, right, depth, strides, one, none, 1, _TILE_COLUMNS, storage, 0)
    elif columns == LANES:
        add_product(total, left, right, depth, strides, one, none, _TILE_ROWS, LANES, storage, 0)
    else:
        add_product(total, left, right, depth, strides, one, none, _TILE_ROWS, _TILE_COLUMNS, storage, 0)


@exact
def project(
    adapted: Any, first: int, num_linears: int, inputs: int, stride: int, part: tuple[int, int], storage: Any
) -> None:
    """Compute ``scale * A x`` of a thread's part of the rows, for the linear layers of the same inputs.

    Args:
        adapted: an ``ADAPTED``.
        first: index of the first of these linear layers in the model.
        inputs: address of the float32 rows, whose starts are ``stride`` values apart.
        part: the thread, and the number of threads.
        storage: the NumPy type of the weights.
    """
    keep_apart()
    rows = carray(pointer(adapted.rows, np.int64), (adapted.num_rows,))
    rank = adapted.max_rank
    at, end = adapted.num_rows * part[0] // part[1], adapted.num_rows * (part[0] + 1) // part[1]
    while at < end:
        count = _num_alike(adapted, rows, at, end)
        left = np.int64(inputs + 4 * rows[at] * stride)
        for slot in range(num_linears):
            update = _update(adapted, rows[at], first + slot)
            total = np.int64(adapted.sums + 4 * (rows[at] * SLOTS + slot) * rank)
            sums = carray(pointer(total, np.float32), (count, SLOTS * rank))
            sums[:, : update.rank] = np.float32(0.0)
            strides = (np.int64(SLOTS * rank), np.int64(stride), np.int64(update.rank))
            depth = np.int64(update.in_features)
            column = 0
            while column < update.rank:
                columns = _TILE_COLUMNS if column + _TILE_COLUMNS <= update.rank else LANES
                right = np.int64(update.a + adapted.item_bytes * column)
                _add_tile(total + 4 * column, left, right, depth, strides, count, columns, storage)
                column += columns
            for row in range(count):
                for column in range(update.rank):
                    sums[row, column] *= np.float32(update.scale)
        at += count


@exact
def _unit_of_b(adapted: Any, row: int, index: int, unit: int) -> Any:
    """Return the address of a unit of a row's B, or 0 if the row has no update of this linear layer."""
    if carray(pointer(adapted.updates, np.int64), (row + 1,))[row] == 0:
        return np.int64(0)
    update = _update(adapted, row, index)
    return update.b + adapted.item_bytes * UNIT * update.rank * unit if update.rank else np.int64(0)


@exact
def add_updates(
    adapted: Any,
    index: int,
    slot: int,
    rows: tuple[int, int],
    unit: int,
    output: int,
    stride: int,
    storage: Any,
) -> None:
    """Add ``B`` times the sums of ``project`` to ``UNIT`` columns of a linear layer's outputs.

    Args:
        index: the linear layer's index in the model.
        slot: its index among those that ``project`` computed together.
        rows: the first row of the step and the number of rows, whose float32 outputs begin at ``output``.
        stride: elements from one row of outputs to the next.
    """
    keep_apart()
    first, num_rows = rows
    updates = carray(pointer(adapted.updates, np.int64), (first + num_rows,))
    strides = (np.int64(stride), np.int64(SLOTS * adapted.max_rank), np.int64(UNIT))
    at = np.int64(0)
    while at < num_rows:
        row, count = first + at, 1
        while count < _TILE_ROWS and at + count < num_rows and updates[row + count] == updates[row]:
            count += 1
        if count < _TILE_ROWS:
            count = 1
        right = np.int64(_unit_of_b(adapted, row, index, unit))
        if right != 0:
            left = np.int64(adapted.sums + 4 * (row * SLOTS + slot) * adapted.max_rank)
            total, depth = np.int64(output + 4 * at * stride), np.int64(_update(adapted, row, index).rank)
            if count == 1:
                coming = np.int64(0)
                if at + 1 < num_rows:
                    coming = np.int64(_unit_of_b(adapted, row + 1, index, unit))
                both, one = (coming or right, coming or right), np.float32(1.0)
                add_product(total, left, right, depth, strides, one, both, 1, UNIT, storage, _COMING_BYTES)
            else:
                for column in range(0, UNIT, _TILE_COLUMNS):
                    panel = right + adapted.item_bytes * column
                    _add_tile(total + 4 * column, left, panel, depth, strides, count, _TILE_COLUMNS, storage)
            outputs = carray(pointer(total, np.float32), (count, stride))
            for each in range(count):
                for column in range(UNIT):
                    outputs[each, column] = narrow(outputs[each, column], storage)
        at += count
