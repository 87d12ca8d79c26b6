"""Memory that faults on what a correct kernel never does.

Global memory consists of the tensors that a kernel got. Shared memory belongs to a CTA. It knows which bytes
are written, which ones an asynchronous copy may still write, and which warps used a byte since the last
barrier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.kernels.ptx.program import Fault

Array = NDArray[Any]
WORD = 16
"""Bytes of the widest access. Accesses are aligned to their own size."""
POISON = 0xFF
"""Fills memory that has not been written: NaN in every float type."""
_POISONED_WORDS = [
    np.frombuffer(bytes(word), np.uint8)
    for word in ([0, 0, 0xC0, 0x7F], [0xC0, 0x7F] * 2, [0, 0x7E] * 2, [0x7F] * 4)
]
"""NaN, as tests fill fresh tensors of float32, bfloat16, float16 and 8 bits; no test data has these bits."""


class GlobalMemory:
    """The tensors of a launch at their real addresses."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        extents: list[list[int]] = []
        for start, end in sorted(extent(tensor) for tensor in tensors if tensor.numel()):
            # Views of one tensor may overlap.
            if extents and start <= extents[-1][1]:
                extents[-1][1] = max(end, extents[-1][1])
            else:
                extents.append([start, end])
        self.starts = np.array([start for start, _ in extents], np.uint64)
        self.ends = np.array([end for _, end in extents], np.uint64)
        self.bases = self.starts & ~np.uint64(WORD - 1)
        self.regions = [
            np.frombuffer((ctypes.c_uint8 * (-(-(end - base) // WORD) * WORD)).from_address(base), np.uint8)
            for base, end in zip(self.bases.tolist(), self.ends.tolist(), strict=True)
        ]

    def load(self, addresses: Array, size: int) -> Array:
        """Return the bytes at each address, uint8 ``[addresses, size]``."""
        result = np.empty((len(addresses), size), np.uint8)
        for rows, region, index in self._locate(addresses, size):
            result[rows] = region[index]
        for pattern in _POISONED_WORDS if size >= 4 else ():
            if (result == np.tile(pattern, size // 4)).all(axis=1).any():
                raise Fault("a read of global memory that was never written")
        return result

    def store(self, addresses: Array, data: Array) -> None:
        """Write bytes ``[addresses, size]``."""
        for rows, region, index in self._locate(addresses, data.shape[1]):
            region[index] = data[rows]

    def _locate(self, addresses: Array, size: int) -> list[tuple[Any, Array, Array]]:
        """Return (rows of ``addresses``, region as elements, index of elements) of each region used."""
        if not len(addresses):
            return []
        check_alignment(addresses, size)
        numbers = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = (numbers < 0) | (addresses + np.uint64(size) > self.ends[numbers])
        if outside.any():
            raise Fault(f"an access of {size} bytes outside every tensor, at {addresses[outside][0]:#x}")
        located = []
        for number in set(numbers.tolist()):
            rows = np.flatnonzero(numbers == number)
            index = (addresses[rows] - self.bases[number]) // np.uint64(size)
            located.append((rows, self.regions[number].reshape(-1, size), index.astype(np.int64)))
        return located


class SharedMemory:
    """The shared memory of a CTA, with a race detector.

    Between two barriers, a byte that one warp wrote may not be read or written by another one, and a byte
    that one warp read may not be written by another one. A byte that an asynchronous copy may still write may
    not be used at all.
    """

    def __init__(self, num_bytes: int, num_warps: int) -> None:
        num_bytes = -(-num_bytes // WORD) * WORD
        self.data = np.full(num_bytes, POISON, np.uint8)
        self.is_written = np.zeros(num_bytes, bool)
        self.is_in_flight = np.zeros(num_bytes, bool)
        self.writer = np.full(num_bytes, -1, np.int8)
        # A read is one bit per warp.
        self.readers = np.zeros(num_bytes, np.uint16 if num_warps <= 16 else np.uint32)

    def load(self, addresses: Array, size: int, warps: Array) -> Array:
        """Return the bytes at each address, uint8 ``[addresses, size]``; ``warps`` are the readers."""
        index = self._index(addresses, size)
        if self.is_in_flight.reshape(-1, size)[index].any():
            raise Fault("a read of shared memory that an asynchronous copy may still write")
        if not self.is_written.reshape(-1, size)[index].all():
            raise Fault("a read of shared memory that was never written")
        writer = self.writer.reshape(-1, size)[index]
        if ((writer >= 0) & (writer != warps[:, None])).any():
            raise Fault("a race: a read of shared memory that another warp wrote since the last barrier")
        bits = (1 << warps).astype(self.readers.dtype)
        np.bitwise_or.at(self.readers.reshape(-1, size), index, bits[:, None])
        return self.data.reshape(-1, size)[index]

    def store(self, addresses: Array, data: Array, warps: Array) -> None:
        """Write bytes ``[addresses, size]``."""
        size = data.shape[1]
        index = self._claim(addresses, size, warps, data)
        self._write(index, data, warps)
        if (self.data.reshape(-1, size)[index] != data).any():
            raise Fault("a race: two threads write different data to shared memory")

    def begin_copy(self, addresses: Array, size: int, warps: Array) -> None:
        """Mark the target of an asynchronous copy, which may be written at any time from now on."""
        index = self._claim(addresses, size, warps, None)
        self.is_in_flight.reshape(-1, size)[index] = True

    def end_copy(self, addresses: Array, data: Array, warps: Array) -> None:
        """Write the data of a copy that its threads have waited for."""
        index = self._index(addresses, data.shape[1])
        self.is_in_flight.reshape(-1, data.shape[1])[index] = False
        self._write(index, data, warps)

    def pass_barrier(self) -> None:
        self.writer.fill(-1)
        self.readers.fill(0)

    def _index(self, addresses: Array, size: int) -> Array:
        check_alignment(addresses, size)
        index = addresses.astype(np.int64)
        if len(index) and (index.max() + size > len(self.data)):
            raise Fault(f"an access of {size} bytes outside shared memory, at {index.max():#x}")
        return index // size

    def _claim(self, addresses: Array, size: int, warps: Array, data: Array | None) -> Array:
        """Check that the warps may write; return the index of the elements.

        Several warps may write the same data: Triton's layouts repeat elements.
        """
        index = self._index(addresses, size)
        if self.is_in_flight.reshape(-1, size)[index].any():
            raise Fault("a write to shared memory that an asynchronous copy may still write")
        writer = self.writer.reshape(-1, size)[index]
        is_changed = True if data is None else self.data.reshape(-1, size)[index] != data
        if (is_changed & (writer >= 0) & (writer != warps[:, None])).any():
            raise Fault("a race: a write to shared memory that another warp wrote since the last barrier")
        bits = (1 << warps).astype(self.readers.dtype)
        if (self.readers.reshape(-1, size)[index] & ~bits[:, None]).any():
            raise Fault("a race: a write to shared memory that another warp read since the last barrier")
        return index

    def _write(self, index: Array, data: Array, warps: Array) -> None:
        size = data.shape[1]
        self.data.reshape(-1, size)[index] = data
        self.is_written.reshape(-1, size)[index] = True
        self.writer.reshape(-1, size)[index] = warps[:, None]


def check_alignment(addresses: Array, size: int) -> None:
    if len(addresses) and np.bitwise_or.reduce(addresses) & (size - 1):
        raise Fault(f"an access of {size} bytes that is not aligned")


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
