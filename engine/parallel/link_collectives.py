"""Collectives between ranks that share no memory, over connections to rank 0.

Each rank has memory of its own for the partial sums of all ranks. When it has computed its own, it sends them
and gets those of the others. Then all ranks add in the same tree as ranks that share memory, so the bits are
the same. With two ranks, the two messages of a small sum cross on the way. With more, all bytes pass through
rank 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch

from quire.engine.block_memory import Buffer
from quire.engine.parallel.collectives import Collectives, Int64s, RanksError, SharedMemory, pieces
from quire.engine.parallel.link import FrameKind, Link
from quire.kernels.cpu import exchange

_CROSSING_BYTES = 32 << 10
"""Both ends may send this many bytes before either receives: the system holds more."""
_CARRY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class LinkCollectives(Collectives):
    """The collectives of one rank.

    Args:
        memory: private memory of this process.
        links: those of rank 0 to the other ranks, in their order; or one, a rank's own to rank 0.
        rank: this rank.
    """

    def __init__(self, memory: SharedMemory, links: Sequence[Link], rank: int) -> None:
        super().__init__(memory, rank)
        self.has_own_files = rank > 0
        self._links = links
        # The kernel has only its address.
        self._carry_function = _CARRY(self._carry)
        carry = ctypes.cast(self._carry_function, ctypes.c_void_p).value
        self._arguments["carry"] = carry

    def send(self, kind: FrameKind, *parts: Buffer) -> None:
        """Send a frame over all links.

        Raises:
            RanksError: a rank has failed.
        """
        with self._failing():
            for link in self._links:
                link.send(kind, *parts)

    def before_logits(self) -> None:
        """See ``Collectives``. Only rank 0 reads the logits of its own memory."""

    def share_logits(self, num_rows: int) -> None:
        """See ``Collectives``. The other ranks' columns stay what they were on ranks other than 0."""
        self.check()
        logits, borders = self.logits(num_rows), self.column_borders
        if self.rank:
            own = logits[:, borders[self.rank] : borders[self.rank + 1]]
            self.send(FrameKind.LOGITS, _bytes(own.contiguous()))
            return
        for link, (first, end) in zip(self._links, pairwise(borders[1:]), strict=True):
            columns = torch.empty((num_rows, end - first))
            with self._failing():
                link.receive_into(FrameKind.LOGITS, _bytes(columns))
            logits[:, first:end] = columns

    def _carry(self, _: object) -> None:
        """Send this rank's slot of a round, and fill those of the others; called within a kernel."""
        try:
            with self._failing():
                self._carry_slots()
        except BaseException as error:
            # Nothing can be raised through the kernel. It goes on, and the next check fails.
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            self.memory.break_off()

    def _carry_slots(self) -> None:
        round_number = int(self.memory.counters[exchange.LINE // 8 * self.rank])
        borders = np.ctypeslib.as_array(
            ctypes.cast(int(self._arguments["borders"][0]), ctypes.POINTER(ctypes.c_int64)),
            (self.num_ranks + 1,),
        )
        num_rows = int(self._arguments["num_rows"][0])
        slots = [self._slot(round_number, rank, num_rows, borders) for rank in range(self.num_ranks)]
        own, others = slots[self.rank], [slots[rank] for rank in range(self.num_ranks) if rank != self.rank]
        if self.rank:
            self._links[0].send(FrameKind.SUM, *own)
            for slot in others:
                self._links[0].receive_into(FrameKind.SUM, *slot)
            return
        is_crossing = len(self._links) == 1 and sum(map(len, own)) <= _CROSSING_BYTES
        if is_crossing:
            self._links[0].send(FrameKind.SUM, *own)
        for link, slot in zip(self._links, others, strict=True):
            link.receive_into(FrameKind.SUM, *slot)
        if is_crossing:
            return
        for rank, link in enumerate(self._links, 1):
            for other, slot in enumerate(slots):
                if other != rank:
                    link.send(FrameKind.SUM, *slot)

    def _slot(self, round_number: int, rank: int, num_rows: int, borders: Int64s) -> list[memoryview]:
        """Return the memory of a rank's pieces in a round."""
        sizes = self.memory.sizes
        begin = ((round_number & 1) * self.num_ranks + rank) * sizes.slot_bytes
        num_bytes = 4 * num_rows * sizes.sum_width
        firsts = [begin + index * sizes.piece_bytes for index in range(len(pieces(borders, rank)))]
        return [self.memory.slots[first : first + num_bytes].data for first in firsts]

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Let nothing follow a failure, since frames of what has failed may still be under way."""
        if self.failure is not None:
            raise RanksError(self.failure)
        try:
            yield
        except RanksError as error:
            self.failure = self.failure or str(error)
            self.memory.break_off()
            raise RanksError(self.failure) from error


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
