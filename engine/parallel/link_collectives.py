"""Collectives between ranks on several machines: rank 0 adds what the others send, and sends them the sums.

Each sum takes one way to rank 0 and one way back. That is the least for two ranks. All bytes pass through
rank 0's connections, so several ranks share their speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch

from quire.engine.block_memory import Buffer
from quire.engine.parallel.collectives import Collectives, Int64s, RanksError, pieces
from quire.engine.parallel.link import Kind, Link


class LinkCollectives(Collectives):
    """The collectives of one rank.

    Args:
        links: those of rank 0 to the other ranks, in their order; or one, a rank's own to rank 0.
        rank: this rank.
        num_ranks: number of ranks.

    Attributes:
        failure: why the ranks have failed, if this process knows it.
    """

    def __init__(self, links: Sequence[Link], rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.has_own_files = rank > 0
        self.failure: str | None = None
        self._links = links

    def sum(self, partials: Sequence[torch.Tensor], borders: Int64s) -> torch.Tensor:
        """See ``Collectives``."""
        own = torch.stack(list(partials)).contiguous()
        if self.rank:
            self.send(Kind.SUM, _bytes(own))
            total = torch.empty_like(own[0])
            self._receive(self._links[0], Kind.SUM, total)
            return total
        parts = list(_placed(own, borders, 0))
        for rank, link in enumerate(self._links, 1):
            others = own.new_empty((len(pieces(borders, rank)), *own.shape[1:]))
            self._receive(link, Kind.SUM, others)
            parts += _placed(others, borders, rank)
        total = add_pieces(parts)
        self.send(Kind.SUM, _bytes(total))
        return total

    def gather_logits(self, columns: torch.Tensor, borders: Sequence[int]) -> torch.Tensor:
        """See ``Collectives``. Ranks other than 0 get zeros instead of the others' columns."""
        logits = columns.new_zeros((columns.shape[0], borders[-1]))
        logits[:, borders[self.rank] : borders[self.rank + 1]] = columns
        if self.rank:
            self.send(Kind.LOGITS, _bytes(columns.contiguous()))
            return logits
        for link, (first, end) in zip(self._links, pairwise(borders[1:]), strict=True):
            others = columns.new_empty((columns.shape[0], end - first))
            self._receive(link, Kind.LOGITS, others)
            logits[:, first:end] = others
        return logits

    def send(self, kind: Kind, *parts: Buffer) -> None:
        """Send a frame over all links.

        Raises:
            RanksError: a rank has failed.
        """
        with self._failing():
            for link in self._links:
                link.send(kind, *parts)

    def _receive(self, link: Link, kind: Kind, target: torch.Tensor) -> None:
        with self._failing():
            link.receive_into(kind, _bytes(target))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Let nothing follow a failure, since frames of what has failed may still be under way."""
        if self.failure is not None:
            raise RanksError(self.failure)
        try:
            yield
        except RanksError as error:
            self.failure = self.failure or str(error)
            raise RanksError(self.failure) from error


def add_pieces(parts: Iterable[tuple[int, int, torch.Tensor]]) -> torch.Tensor:
    """Return the sum of pieces in a fixed binary tree, whose leaves are segments.

    Args:
        parts: the first segment, the number of segments and the sum of each piece, in order; a piece is a
            whole subtree, see ``pieces``.
    """
    levels: dict[int, torch.Tensor] = {}
    for first, size, part in parts:
        level, total = size.bit_length() - 1, part
        while first >> level & 1:
            total = total + levels.pop(level)
            level += 1
        levels[level] = total
    (whole,) = levels.values()
    return whole


def _placed(tensors: torch.Tensor, borders: Int64s, rank: int) -> Iterable[tuple[int, int, torch.Tensor]]:
    """Yield the first segment, the number of segments and the sum of each of a rank's pieces."""
    own_first = int(borders[rank])
    for piece, tensor in zip(pieces(borders, rank), tensors, strict=True):
        yield own_first + piece.start, len(piece), tensor


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
