"""Collectives between the ranks of a worker, in memory that they share.

A rank is a process. All ranks call the same collectives in the same order.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.kernels.cpu import exchange, threads
from quire.kernels.cpu.futex import futex_call
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.weighted_sums import Int64s

_PAGE = mmap.PAGESIZE
_piece_size: Callable[[int, int], int] = exchange.piece_size.py_func  # type: ignore[attr-defined]
_LOOK_NANOSECONDS = 5_000_000
"""Interval at which a sleeping rank checks whether another one has failed."""


class RanksError(RuntimeError):
    """A rank has ended, failed or does not answer; the worker must end."""


@dataclass(frozen=True)
class SharedSizes:
    """The sizes of the memory that ranks share.

    Attributes:
        num_ranks: number of ranks.
        max_rows: most rows of a sum, and of the logits.
        hidden_size: values of a row of a sum.
        vocab_size: logits of a row.
        num_message_bytes: bytes for the tensors of a step.
    """

    num_ranks: int
    max_rows: int
    hidden_size: int
    vocab_size: int
    num_message_bytes: int

    @property
    def sum_width(self) -> int:
        """Number of values in a row of a sum, with padding."""
        return _rounded(self.hidden_size, UNIT)

    @property
    def logits_width(self) -> int:
        """Number of values in a row of logits, with padding."""
        return _rounded(self.vocab_size, UNIT)

    @property
    def piece_bytes(self) -> int:
        """Bytes of the partial sums of one piece of segments."""
        return _rounded(4 * self.max_rows * self.sum_width, _PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the partial sums of one rank."""
        return exchange.MOST_PIECES * self.piece_bytes

    @property
    def gathered_width(self) -> int:
        """Most values in a row that the ranks gather in the slots of a round."""
        return self.num_ranks * exchange.MOST_PIECES * self.sum_width

    @property
    def offsets(self) -> tuple[int, int, int, int]:
        """Offsets at which the slots, the logits and the message begin, and at which the memory ends."""
        slots = _PAGE
        logits = slots + 2 * self.num_ranks * self.slot_bytes
        message = logits + _rounded(4 * self.max_rows * self.logits_width, _PAGE)
        return slots, logits, message, message + _rounded(self.num_message_bytes, _PAGE)


class SharedMemory:
    """Anonymous memory that the ranks of one worker map. It is freed when the last of them ends.

    The system allocates a page when it is first written.

    Args:
        sizes: the same for all ranks.
        descriptor: a file descriptor of the memory; None to make it.
    """

    def __init__(self, sizes: SharedSizes, descriptor: int | None = None) -> None:
        self.sizes = sizes
        num_bytes = sizes.offsets[3]
        self.descriptor = os.memfd_create("quire-ranks") if descriptor is None else descriptor
        try:
            if descriptor is None:
                os.ftruncate(self.descriptor, num_bytes)
            self._map = mmap.mmap(self.descriptor, num_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = self._bytes.ctypes.data
        slots, logits, message, end = sizes.offsets
        self.slots = self._bytes[slots:logits]
        floats = self._bytes[logits:message].view(np.float32)
        self.logits = torch.from_numpy(floats[: sizes.max_rows * sizes.logits_width]).view(
            sizes.max_rows, sizes.logits_width
        )
        self.message = self._bytes[message:end]
        # The counters of the ranks, and behind them whether a rank has failed.
        self.counters = self._bytes[: exchange.LINE * (exchange.MOST_RANKS + 1)].view(np.int64)

    def break_off(self) -> None:
        """Stop all waits between ranks; results are wrong from now on."""
        self.counters[_BROKEN] = 1

    @property
    def is_broken(self) -> bool:
        """Whether a rank has failed."""
        return bool(self.counters[_BROKEN])


_BROKEN = exchange.LINE // 8 * exchange.MOST_RANKS


class Collectives:
    """The collectives of one rank. One thread calls them.

    Attributes:
        memory: the memory that the ranks share.
        rank: this rank.
        num_rounds: number of meetings of the ranks that this rank has reached.
        failure: why the ranks have failed, if this process knows it.
    """

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        self.memory = memory
        self.rank = rank
        self.num_rounds = 0
        self.failure: str | None = None
        sizes = memory.sizes
        self._patience = np.array([0, _LOOK_NANOSECONDS], np.int64)
        self._arguments = np.array(
            [
                (
                    rank,
                    sizes.num_ranks,
                    memory.address,
                    memory.address + 8 * _BROKEN,
                    memory.address + sizes.offsets[0],
                    sizes.slot_bytes,
                    sizes.piece_bytes,
                    exchange.SPINS if len(os.sched_getaffinity(0)) >= sizes.num_ranks else 1,
                    *futex_call(),
                    self._patience.ctypes.data,
                )
            ],
            exchange.EXCHANGE,
        )
        self.address = self._arguments.ctypes.data
        """Address of an ``exchange.EXCHANGE``."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.memory.sizes.num_ranks

    def sum(self, partials: Sequence[torch.Tensor], borders: Int64s) -> torch.Tensor:
        """Return the sum of all ranks' tensors ``[num_rows, sum_width]`` in float32, in a fixed tree.

        Args:
            partials: the sums of this rank's ``pieces``.
            borders: the first segment of each rank, and the number of segments.

        Raises:
            RanksError: a rank has failed, or the tensors are larger than the memory for them.
        """
        sizes = self.memory.sizes
        num_rows, width = partials[0].shape
        if num_rows > sizes.max_rows or width != sizes.sum_width:
            raise RanksError(
                f"a sum of {num_rows} x {width} values does not fit {sizes.max_rows} x {sizes.sum_width}"
            )
        self.num_rounds += 1
        number = (self.num_rounds & 1) * sizes.num_ranks + self.rank
        for index, partial in enumerate(partials):
            begin = number * sizes.slot_bytes + index * sizes.piece_bytes
            piece = self.memory.slots[begin : begin + 4 * num_rows * width]
            piece.view(np.float32)[:] = partial.contiguous().view(-1).numpy()
        output = torch.empty_like(partials[0])
        self._meet(borders.ctypes.data, num_rows, width, output.data_ptr())
        return output

    def gather_logits(self, columns: torch.Tensor, first_column: int) -> torch.Tensor:
        """Return the whole logits ``[num_rows, logits_width]``; each rank has computed some of the columns.

        Raises:
            RanksError: a rank has failed, or there are more rows than the memory has.
        """
        num_rows, width = columns.shape
        # The first meeting protects the logits of the previous call, which another rank may still read.
        self.meet()
        logits = self.logits(num_rows)
        logits[:, first_column : first_column + width] = columns
        self.meet()
        return logits.clone()

    def logits(self, num_rows: int) -> torch.Tensor:
        """Return the memory ``[num_rows, logits_width]`` into which each rank writes its logits.

        Raises:
            RanksError: there are more rows than the memory has.
        """
        if num_rows > self.memory.sizes.max_rows:
            raise RanksError(f"{num_rows} rows of logits do not fit {self.memory.sizes.max_rows}")
        return self.memory.logits[:num_rows]

    def meet(self) -> None:
        """Wait for all ranks.

        Raises:
            RanksError: a rank has failed.
        """
        self.num_rounds += 1
        self._meet(0, 0, 0, 0)

    def _meet(self, *sum_arguments: int) -> None:
        """Wait for all ranks, and add their slots; the arguments are the last ones of an ``exchange.SUM``."""
        arguments = np.array([(self.address, self.num_rounds, *sum_arguments)], exchange.SUM)
        threads.run(exchange.sum_kernel().address, arguments.ctypes.data, 1)
        self.check()

    def check(self) -> None:
        """Raise RanksError if a rank has failed."""
        if self.memory.is_broken:
            raise RanksError(self.failure or "a rank of this worker has failed")


def pieces(borders: Int64s, rank: int) -> list[range]:
    """Return the segments of each piece of a rank, counted from the rank's first segment."""
    own_first, end = borders[rank : rank + 2].tolist()
    first, found = own_first, []
    while first < end:
        size = _piece_size(first, end)
        found.append(range(first - own_first, first - own_first + size))
        first += size
    return found


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
