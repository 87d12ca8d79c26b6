"""Maps the pools of other workers on this host, and copies blocks out of them.

A worker maps the pool of a peer if both run on the same host as the same user, and the peer's socket is
reachable. Otherwise the peer sends its blocks in messages.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from pathlib import Path

from quire.kvtransfer.errors import NotSharedError, ProtocolError, SenderGoneError
from quire.kvtransfer.frame import Frame, Transport
from quire.kvtransfer.transports.interface import Intake, Tell, ToldOnce
from quire.kvtransfer.transports.messages import Messages
from quire.kvtransfer.transports.pool_socket import PoolSocket, boot_id, fetch_pool, open_directory
from quire.protos import kvtransfer_pb2 as pb

FAILED_SECONDS = 5.0
"""Seconds before a worker tries again to map a pool that could not be mapped."""


class PeerPool:
    """The pool of a worker on this host, mapped read-only."""

    transport = Transport.SHARED
    executor: Executor | None = None

    def __init__(self, mapping: mmap.mmap, connection: socket.socket) -> None:
        self.connection = connection
        self._bytes: memoryview | None = memoryview(mapping)

    def frames(
        self, messages: Iterable[pb.BlockFrame], block_bytes: int, bare_bytes: int = 0, frame_bytes: int = 0
    ) -> Iterator[Frame]:
        """Yield the frames; see ``Intake.frames``."""
        sizes = (block_bytes, bare_bytes)
        return (
            self._joined(each, sizes, frame_bytes) if each.frame_ids else self.frame(each, block_bytes)
            for each in messages
        )

    def _joined(self, message: pb.BlockFrame, sizes: tuple[int, int], size: int) -> Frame:
        """Return a frame whose payload is a copy of the parts of a block in the peer's pool."""
        pool = self._bytes
        if pool is None:
            raise SenderGoneError("the process that holds the blocks has ended")
        places = message.frame_ids
        if not size or len(places) * size not in sizes or (max(places) + 1) * size > len(pool):
            raise ProtocolError(f"block {message.index} is not in the sender's pool")
        payload = b"".join(pool[place * size : (place + 1) * size] for place in places)
        return Frame(message.index, message.block_hash, payload, message.digest)

    def frame(self, message: pb.BlockFrame, block_bytes: int) -> Frame:
        """Return a frame whose payload is the block in the peer's pool, which may still change."""
        pool = self._bytes
        if pool is None:
            raise SenderGoneError("the process that holds the blocks has ended")
        start = message.block_id * block_bytes
        if not message.HasField("block_id") or start + block_bytes > len(pool):
            raise ProtocolError(f"block {message.index} is not in the sender's pool")
        payload = pool[start : start + block_bytes]
        return Frame(message.index, message.block_hash, payload, message.digest, message.block_id)

    def close(self) -> None:
        """Unmap the pool, at the latest when running copies have ended."""
        self._bytes = None
        self.connection.close()


class SharedPools:
    """The ``Transports`` of a worker that shares pools with others on its host.

    Args:
        directory: directory of the sockets of workers that share pools.
        tell: called once for each peer, with the transport that is used.
    """

    def __init__(self, directory: Path, tell: Tell = lambda epoch, transport, reason: None) -> None:
        self.offer = pb.SharedPool()
        self.allowed = frozenset((Transport.SHARED, Transport.MESSAGES))
        self._directory = directory
        self._tell = ToldOnce(tell)
        self._socket: PoolSocket | None = None
        self._pools: dict[str, PeerPool] = {}
        self._fetches: dict[str, asyncio.Task[PeerPool | str]] = {}
        """For each epoch whose pool is not mapped: the fetch that is running, or that failed recently."""

    def share(self, epoch: str, descriptor: int) -> None:
        """Offer this worker's pool to others.

        Raises:
            OSError: the directory or the socket cannot be used.
        """
        self._socket = PoolSocket(open_directory(self._directory), epoch, descriptor)
        self.offer = pb.SharedPool(boot_id=boot_id(), epoch=epoch)

    @property
    def mapped_epochs(self) -> set[str]:
        """The epochs of the workers whose pools are mapped."""
        return set(self._pools)

    async def choose(self, offer: pb.SharedPool) -> Intake:
        """Map the peer's pool, or choose messages if that is not possible."""
        try:
            return await self._map(offer)
        except NotSharedError as error:
            self._tell(offer.epoch, Transport.MESSAGES, str(error))
            return Messages()

    async def _map(self, offer: pb.SharedPool) -> PeerPool:
        if not offer.boot_id:
            raise NotSharedError("it shares no pool")
        if offer.boot_id != boot_id():
            raise NotSharedError("it runs on another host")
        if (pool := self._pools.get(offer.epoch)) is not None:
            return pool
        if (fetch := self._fetches.get(offer.epoch)) is None:
            fetch = self._fetches[offer.epoch] = asyncio.create_task(self._fetch(offer.epoch))
        # All callers wait for the same fetch, which continues if one of them is cancelled.
        await asyncio.wait([fetch])
        if isinstance(outcome := fetch.result(), str):
            raise NotSharedError(outcome)
        return outcome

    async def _fetch(self, epoch: str) -> PeerPool | str:
        """Map a pool. If it cannot be mapped, return the problem, and remember it for a short time."""
        loop, seconds = asyncio.get_running_loop(), 0.0
        try:
            pool = self._pools[epoch] = PeerPool(*await fetch_pool(self._directory, epoch))
        except NotSharedError as error:
            seconds = FAILED_SECONDS
            return str(error)
        finally:
            loop.call_later(seconds, self._fetches.pop, epoch)
        # The peer sends nothing more, so the connection becomes readable when the peer ends.
        loop.add_reader(pool.connection, self._unmap, epoch)
        self._tell(epoch, Transport.SHARED, "")
        return pool

    def _unmap(self, epoch: str) -> None:
        pool = self._pools.pop(epoch)
        asyncio.get_running_loop().remove_reader(pool.connection)
        pool.close()

    def close(self) -> None:
        """Stop sharing the pool, and unmap the pools of others."""
        if self._socket is not None:
            self._socket.close()
        for fetch in self._fetches.values():
            fetch.cancel()
        for epoch in self.mapped_epochs:
            self._unmap(epoch)
