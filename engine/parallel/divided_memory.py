"""KV blocks whose heads lie on several machines, each with the rank that computes them.

Rank 0 moves whole blocks: it puts them together from the parts of all ranks, and takes them apart again. So
transfers, tiers and swap space are the same as without ranks, and a block crosses to another worker in one
piece, whatever the numbers of ranks there and here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Lock

import numpy as np
import torch

from quire.engine.block_memory import BlockMemory, Buffer, Pairs
from quire.engine.kv_memory import KvMemory, check_scales
from quire.engine.parallel.collectives import RanksError
from quire.engine.parallel.head_parts import part_shape, put_part, take_part
from quire.engine.parallel.link import FrameKind, Link
from quire.engine.parallel.messages import Bytes
from quire.kvindex.kv_layout import KvShape

_CHUNK_BYTES = 16 << 20
"""About how many bytes of blocks one request moves, so that an answer comes within the limit of time."""
_CPU = torch.device("cpu")


class BlockLinks:
    """Rank 0's requests about blocks to the other ranks; any thread may make them.

    Attributes:
        failure: why the ranks have failed, if this process knows it.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self._lock = Lock()
        self.failure: str | None = None

    def ask(self, requests: Mapping[int, tuple[FrameKind, Sequence[Buffer]]]) -> dict[int, bytearray]:
        """Send requests to ranks, and return their answers.

        Raises:
            RanksError: a rank has failed.
        """
        with self._lock:
            # Answers to what has failed may still be under way.
            if self.failure is not None:
                raise RanksError(self.failure)
            try:
                for rank, (kind, parts) in requests.items():
                    self._links[rank - 1].send(kind, *parts)
                return {rank: self._links[rank - 1].receive(FrameKind.DONE)[1] for rank in requests}
            except RanksError as error:
                self.failure = self.failure or str(error)
                raise RanksError(self.failure) from error


class DividedMemory(BlockMemory):
    """The blocks of rank 0.

    Args:
        shape: the shape of a whole block.
        num_blocks: number of blocks.
        heads: the KV heads of each rank, in the order of ranks; several may have the same.
        links: to the other ranks.
    """

    def __init__(self, shape: KvShape, num_blocks: int, heads: Sequence[range], links: BlockLinks) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.device = _CPU
        self.descriptor = None
        self._own = KvMemory(part_shape(shape, heads[0]), num_blocks, _CPU)
        self.layers, self.scales = self._own.layers, self._own.scales
        self._heads = heads
        self._links = links

    def vectors(self, block_ids: Sequence[int]) -> torch.Tensor:
        """See ``BlockMemory``."""
        copies = KvMemory(self.shape, len(block_ids), _CPU)
        for copy_id, block in enumerate(self._read(block_ids)):
            copies.write(copy_id, block.data)
        return copies.vectors(range(len(block_ids)))

    def write(self, block_id: int, payload: Buffer) -> Buffer:
        """See ``BlockMemory``. It returns a copy of the payload, and that copy is what was written."""
        if len(payload) != self.shape.block_bytes:
            raise ValueError(f"a block has {self.shape.block_bytes} bytes, got {len(payload)}")
        copied = bytes(payload)
        check_scales(self.shape, copied)
        self._write([block_id], [copied])
        return copied

    def payload_or_copy(self, block_id: int) -> Buffer:
        """See ``BlockMemory``."""
        (block,) = self._read([block_id])
        return block.data

    def copies_event(self) -> None:
        """See ``BlockMemory``."""
        return

    def copy_within(self, pairs: Pairs) -> None:
        """See ``BlockMemory``."""
        if pairs:
            request = FrameKind.COPY, [np.array(pairs, np.int64).tobytes()]
            self._links.ask(dict.fromkeys(range(1, len(self._heads)), request))
            self._own.copy_within(pairs)

    def copy_out(self, host: KvMemory, pairs: Pairs) -> None:
        """See ``BlockMemory``."""
        for some in self._chunks(pairs):
            blocks = self._read([block_id for block_id, _ in some])
            for (_, host_id), block in zip(some, blocks, strict=True):
                host.write(host_id, block.data)

    def copy_in(self, host: KvMemory, pairs: Pairs) -> None:
        """See ``BlockMemory``."""
        for some in self._chunks(pairs):
            blocks = [host.payload(host_id) for host_id, _ in some]
            self._write([block_id for _, block_id in some], blocks)

    def _read(self, block_ids: Sequence[int]) -> Iterable[Bytes]:
        """Return copies of whole blocks."""
        ids = np.array(block_ids, np.int64).tobytes()
        parts = self._links.ask({rank: (FrameKind.READ, [ids]) for rank in _owners(self._heads)})
        blocks = [np.zeros(self.shape.block_bytes, np.uint8) for _ in block_ids]
        for block, block_id in zip(blocks, block_ids, strict=True):
            own = np.frombuffer(self._own.payload(block_id), np.uint8)
            put_part(block, self.shape, self._heads[0], own)
        for rank, data in parts.items():
            some = np.frombuffer(data, np.uint8).reshape(len(block_ids), -1)
            for block, part in zip(blocks, some, strict=True):
                put_part(block, self.shape, self._heads[rank], part)
        return blocks

    def _write(self, block_ids: Sequence[int], payloads: Sequence[Buffer]) -> None:
        ids = np.array(block_ids, np.int64).tobytes()
        blocks = [np.frombuffer(each, np.uint8) for each in payloads]

        def parts(rank: int) -> list[memoryview]:
            return [take_part(block, self.shape, self._heads[rank]).data for block in blocks]

        self._links.ask({rank: (FrameKind.WRITE, [ids, *parts(rank)]) for rank in range(1, len(self._heads))})
        for block_id, part in zip(block_ids, parts(0), strict=True):
            self._own.write(block_id, part)

    def _chunks(self, pairs: Pairs) -> Iterator[Pairs]:
        size = max(1, _CHUNK_BYTES // self.shape.block_bytes)
        return (pairs[first : first + size] for first in range(0, len(pairs), size))


def _owners(heads: Sequence[range]) -> list[int]:
    """Return the ranks from 1 that have heads which no rank before them has."""
    seen, found = set(heads[0]), []
    for rank, own in enumerate(heads[1:], 1):
        if not seen.issuperset(own):
            found.append(rank)
        seen.update(own)
    return found
