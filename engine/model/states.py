"""Where the states of layers like Mamba 2 lie in KV blocks.

A token of such a layer needs the state after the token before it, and nothing else. To the blocks it is
therefore a layer with a window of 2 tokens: the part of a block that windows see holds the state after the
block's last token, or after the last one that is computed so far. A prefix hit ends where this part is left,
a sequence that has gone on gives it up first, and whatever moves, checks, copies or restores blocks needs to
know nothing about states. The rows of all states follow each other, and fill the keys and values of as many
layers as they take.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from quire.engine.kv_cache.memory import KvMemory
from quire.kernels.cpu.recurrence import StatePlaces
from quire.kvindex.kv_layout import KvShape
from quire.settings.setting import SettingError

WINDOW = 2
"""A token needs what its own token and the one before left."""


class StateShape(NamedTuple):
    """The states of a model, which are equal in all layers that have one.

    Attributes:
        num_layers: number of layers with a state.
        num_rows, row_size: each state is ``num_rows`` rows of ``row_size`` float32 numbers.
    """

    num_layers: int
    num_rows: int
    row_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the states of all layers."""
        return self.num_layers * self.num_rows * self.row_size * 4


def with_states(shape: KvShape, states: StateShape) -> KvShape:
    """Return the shape of blocks that also hold states.

    Args:
        shape: the shape of blocks of the layers with keys and values.
        states: the states.

    Raises:
        SettingError: the keys and values of a layer take less memory than a row of a state.
    """
    num_rows = states.num_layers * states.num_rows
    num_layers = shape.num_layers + -(-num_rows // _rows_per_part(shape, states))
    return replace(
        shape, num_layers=num_layers, window=WINDOW, window_layers=tuple(range(shape.num_layers, num_layers))
    )


def _rows_per_part(shape: KvShape, states: StateShape) -> int:
    """Return how many rows of a state take the place of one layer's keys and values."""
    layer_bytes = shape.flat.vector_bytes // shape.num_layers
    num_rows = layer_bytes // (states.row_size * 4)
    if not num_rows:
        raise SettingError(
            f"a block of {shape.block_size} tokens has {layer_bytes} bytes for a layer, and a row of a state "
            f"takes {states.row_size * 4}: raise the block size"
        )
    return num_rows


class States:
    """The states in one memory.

    Args:
        memory: the memory, whose shape is one of ``with_states``.
        shape: the shape of the states.
    """

    def __init__(self, memory: KvMemory, shape: StateShape) -> None:
        parts = list(memory.shape.window_layers)
        first = memory.layers[0]
        self._addresses = np.array([layer.data_ptr() for layer in memory.layers])[parts]
        self._frames = np.array(memory.frames)[parts]
        self._frame_bytes = first.stride(0) * first.itemsize
        self._rows_per_part = _rows_per_part(memory.shape, shape)
        self._block_size, self._num_rows = memory.shape.block_size, shape.num_rows

    def places(self, layer: int) -> StatePlaces:
        """Return where the states of a layer lie; ``layer`` counts those that have a state."""
        return StatePlaces(
            self._addresses,
            self._frames,
            self._frame_bytes,
            self._rows_per_part,
            self._block_size,
            layer * self._num_rows,
        )
