"""How rank 0 sends steps to the other ranks: a header through a socket, and tensors in shared memory.

The tensors of a message are valid until the next meeting of all ranks.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from quire.engine.model.collectives import RanksError, SharedMemory
from quire.engine.model.step_tensors import RowAdapters, StepTensors
from quire.kernels.metadata import AttentionMetadata

_HEADER = struct.Struct("8q")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """The action that a message requests."""

    MAP_POOL = 1
    STEP = 2
    LOAD_ADAPTER = 3
    """Its number is the adapter's address in rank 0. A descriptor of its ``weights_file`` comes with it."""
    DROP_ADAPTER = 4


class Header(NamedTuple):
    """A kind and up to seven numbers, whose meaning depends on the kind."""

    kind: int
    numbers: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """Return the bytes that go through the socket."""
        return _HEADER.pack(self.kind, *self.numbers, *[0] * (7 - len(self.numbers)))

    @classmethod
    def of(cls, data: bytes) -> Header:
        """Return the header that some bytes contain."""
        kind, *numbers = _HEADER.unpack(data)
        return cls(kind, tuple(numbers))


def message_bytes(max_tokens: int, max_num_seqs: int, max_table_width: int, max_frames: int = 1) -> int:
    """Return the most bytes of a step's tensors; a block has at most ``max_frames`` frames."""
    num_per_frame = max_tokens + max_num_seqs * max_table_width
    return 8 * (4 * max_tokens + 4 * max_num_seqs + max_frames * num_per_frame + 64)


def write_step(memory: SharedMemory, step: StepTensors) -> Header:
    """Write the tensors of a step.

    Raises:
        RanksError: the step is larger than the memory for it.
    """
    metadata = step.metadata
    tables = metadata.block_tables
    num_tokens, num_kept = step.input_ids.shape[0], step.logit_rows.shape[0]
    if max(num_tokens, num_kept) > memory.sizes.max_rows:
        raise RanksError(f"a step of {num_tokens} tokens does not fit {memory.sizes.max_rows}")
    writer = _Writer(memory)
    of_tokens = step.input_ids, step.positions, step.logit_rows, metadata.slot_mapping
    for tensor in (*of_tokens, tables, metadata.query_starts, metadata.seq_lens):
        writer.put(tensor)
    max_rank = 0
    if step.adapters is not None:
        writer.put(torch.from_numpy(step.adapters.addresses))
        max_rank = step.adapters.max_rank
    most = -1 if metadata.max_new_tokens is None else metadata.max_new_tokens
    num_seqs, width = tables.shape[-2:]
    return Header(Kind.STEP, (num_tokens, num_kept, num_seqs, width, most, step.num_hidden, max_rank))


def read_step(memory: SharedMemory, header: Header, num_frames: int = 1) -> StepTensors:
    """Return the tensors of a step, which lie in shared memory; ``num_frames`` are those of a block.

    The addresses of adapters are those in rank 0.
    """
    num_tokens, num_kept, num_seqs, width, most, num_hidden, max_rank = header.numbers
    reader = _Reader(memory)
    tokens, positions = reader.take(torch.int64, num_tokens), reader.take(torch.int64, num_tokens)
    logit_rows, slots = reader.take(torch.int64, num_kept), reader.take(torch.int64, num_frames * num_tokens)
    tables = reader.take(torch.int32, num_frames * num_seqs * width).view(-1, num_seqs, width)
    metadata = AttentionMetadata(
        block_tables=tables if num_frames > 1 else tables[0],
        query_starts=reader.take(torch.int32, num_seqs + 1),
        seq_lens=reader.take(torch.int32, num_seqs),
        slot_mapping=slots.view(num_frames, -1) if num_frames > 1 else slots,
        max_new_tokens=None if most < 0 else most,
    )
    adapters = RowAdapters(reader.take(torch.int64, num_tokens).numpy(), max_rank) if max_rank else None
    return StepTensors(tokens, positions, logit_rows, metadata, num_hidden, adapters)


class _Writer:
    """Writes tensors one behind the other."""

    def __init__(self, memory: SharedMemory) -> None:
        self._message = memory.message
        self._offset = 0

    def put(self, tensor: torch.Tensor) -> None:
        data = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
        end = self._offset + len(data)
        if end > len(self._message):
            raise RanksError(f"a message of {end} bytes or more does not fit {len(self._message)}")
        self._message[self._offset : end] = data
        self._offset = _next_offset(self._offset, len(data))


class _Reader:
    """Returns the tensors of a message one after the other."""

    def __init__(self, memory: SharedMemory) -> None:
        self._message = memory.message
        self._offset = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        size = count * dtype.itemsize
        data = self._message[self._offset : self._offset + size]
        self._offset = _next_offset(self._offset, size)
        return torch.from_numpy(data).view(dtype) if size else torch.empty(0, dtype=dtype)


def _next_offset(offset: int, size: int) -> int:
    return -(-(offset + size) // 8) * 8
