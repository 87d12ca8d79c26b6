"""How rank 0 tells the other ranks what to run: a header, and the tensors of a step one behind the other."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.engine.parallel.collectives import RanksError
from quire.engine.step_tensors import StepTensors
from quire.kernels.metadata import AttentionMetadata

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_HEADER = struct.Struct("6q")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    """What a message asks for."""

    MAP_POOL = 1
    STEP = 2


class Header(NamedTuple):
    """A kind and five numbers, whose meaning depends on the kind."""

    kind: int
    first: int = 0
    second: int = 0
    third: int = 0
    fourth: int = 0
    fifth: int = 0

    def to_bytes(self) -> bytes:
        """Return the bytes to send."""
        return _HEADER.pack(*self)

    @classmethod
    def of(cls, data: bytes) -> Header:
        """Return the header that some bytes contain."""
        return cls(*_HEADER.unpack(data))


def message_bytes(max_tokens: int, max_num_seqs: int, max_table_width: int) -> int:
    """Return the most bytes of a step's tensors."""
    return 8 * (4 * max_tokens + 4 * max_num_seqs + max_num_seqs * max_table_width + 64)


def step_header(step: StepTensors, max_rows: int) -> Header:
    """Return the header of a step, which tells the sizes of its tensors.

    Raises:
        RanksError: the step has more rows than the ranks have memory for.
    """
    metadata = step.metadata
    most = -1 if metadata.max_new_tokens is None else metadata.max_new_tokens
    num_tokens, num_logits = step.input_ids.shape[0], step.logit_rows.shape[0]
    if max(num_tokens, num_logits) > max_rows:
        raise RanksError(f"a step of {num_tokens} tokens does not fit {max_rows}")
    num_seqs, width = metadata.block_tables.shape
    return Header(Kind.STEP, num_tokens, num_logits, num_seqs, width, most)


def step_bytes(step: StepTensors) -> int:
    """Return the bytes that the tensors of a step take in a message."""
    return sum(_next_offset(0, each.nbytes) for each in _tensors(step))


def write_step(message: Bytes, step: StepTensors) -> None:
    """Write the tensors of a step into a message.

    Raises:
        RanksError: the message has too few bytes.
    """
    offset = 0
    for tensor in _tensors(step):
        data = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
        end = offset + len(data)
        if end > len(message):
            raise RanksError(f"a message of {end} bytes or more does not fit {len(message)}")
        message[offset:end] = data
        offset = _next_offset(offset, len(data))


def read_step(message: Bytes, header: Header) -> StepTensors:
    """Return the tensors of a step, which lie in the message."""
    _, num_tokens, num_logits, num_seqs, width, most = header
    reader = _Reader(message)
    tokens, positions = reader.take(torch.int64, num_tokens), reader.take(torch.int64, num_tokens)
    logit_rows, slots = reader.take(torch.int64, num_logits), reader.take(torch.int64, num_tokens)
    metadata = AttentionMetadata(
        block_tables=reader.take(torch.int32, num_seqs * width).view(num_seqs, width),
        query_starts=reader.take(torch.int32, num_seqs + 1),
        seq_lens=reader.take(torch.int32, num_seqs),
        slot_mapping=slots,
        max_new_tokens=None if most < 0 else most,
    )
    return StepTensors(tokens, positions, logit_rows, metadata)


def _tensors(step: StepTensors) -> tuple[torch.Tensor, ...]:
    metadata = step.metadata
    return (
        step.input_ids,
        step.positions,
        step.logit_rows,
        metadata.slot_mapping,
        metadata.block_tables,
        metadata.query_starts,
        metadata.seq_lens,
    )


class _Reader:
    """Returns the tensors of a message one after the other."""

    def __init__(self, message: Bytes) -> None:
        self._message = message
        self._offset = 0

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        size = count * dtype.itemsize
        data = self._message[self._offset : self._offset + size]
        self._offset = _next_offset(self._offset, size)
        return torch.from_numpy(data).view(dtype) if size else torch.empty(0, dtype=dtype)


def _next_offset(offset: int, size: int) -> int:
    return -(-(offset + size) // 8) * 8
