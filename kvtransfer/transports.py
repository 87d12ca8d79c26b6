"""How the bytes of blocks come from another worker: in gRPC messages, or out of its pool, mapped or by NIXL.

The worker that takes blocks chooses, for each peer. It copies blocks out of the peer's pool if both run on
one host as one user and it reaches the peer's socket; otherwise the peer sends them in messages. Everything
else, such as tickets, credit, hashes and digests, comes in messages either way.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, Protocol

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import NotSharedError, ProtocolError, SenderGoneError
from quire.kvtransfer.frame import Frame
from quire.kvtransfer.nixl_pool import Measured, NixlAgent, NixlPool
from quire.kvtransfer.pool_socket import PoolSocket, boot_id, fetch_pool, open_directory
from quire.protos import kvtransfer_pb2 as pb

Transport = Literal["grpc", "shared", "nixl"]
Choice = Literal["auto", "grpc", "shared", "nixl"]
"""Setting: "auto" shares pools where this is possible; "shared" and "nixl" refuse all other transports."""

Tell = Callable[[str, Transport, str], None]
"""Is told which transport is used for the worker with an epoch, and why."""

FAILED_SECONDS = 5.0
"""How long a pool that could not be mapped is not asked for again."""
_MAX_TOLD = 1024


class Intake(Protocol):
    """Gets the bytes of one peer's blocks."""

    @property
    def transport(self) -> Transport:
        """What the intake is counted as."""

    def frames(self, messages: Iterable[pb.BlockFrame], block_bytes: int) -> Iterator[Frame]:
        """Yield the frames that messages describe, in order; called in a thread.

        ``Frame.check_copy`` must accept a copy of a payload before anything uses the copy.

        Raises:
            DigestMismatchError: the payload or the hash is not what was sent.
            ProtocolError: the block does not have ``block_bytes`` bytes, or is not in the peer's pool.
            SenderGoneError: the peer has ended.
        """


class Messages:
    """Takes blocks from the messages themselves."""

    transport: Transport = "grpc"

    def frames(self, messages: Iterable[pb.BlockFrame], block_bytes: int) -> Iterator[Frame]:
        """Yield the frames; see ``Intake.frames``."""
        return (self.frame(each, block_bytes) for each in messages)

    def frame(self, message: pb.BlockFrame, block_bytes: int) -> Frame:
        """Return the frame with the bytes that are in the message, which have been checked."""
        frame = frames.from_proto(message)
        if len(frame.payload) != block_bytes:
            raise ProtocolError(f"block {frame.index} has {len(frame.payload)} bytes, not {block_bytes}")
        return frame


class PeerPool:
    """The pool of a worker on this host, mapped read-only."""

    transport: Transport = "shared"

    def __init__(self, mapping: mmap.mmap, connection: socket.socket) -> None:
        self.connection = connection
        self._bytes: memoryview | None = memoryview(mapping)

    def frames(self, messages: Iterable[pb.BlockFrame], block_bytes: int) -> Iterator[Frame]:
        """Yield the frames; see ``Intake.frames``."""
        return (self.frame(each, block_bytes) for each in messages)

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
        """Unmap the pool, at the latest when the copies end that are being made."""
        self._bytes = None
        self.connection.close()


class Transports:
    """The transports of one worker: its own pool as others may map it, and the pools that it has mapped.

    Args:
        choice: which transports may be used.
        directory: where the sockets of the workers are that share pools.
        tell: is told once of each peer which transport is used.
        measured: is told the speed of NIXL for each peer.

    Attributes:
        offer: this worker's pool; empty if others cannot map it.
    """

    def __init__(
        self,
        choice: Choice,
        directory: Path,
        tell: Tell = lambda epoch, transport, reason: None,
        measured: Measured = lambda epoch, rate: None,
    ) -> None:
        self.offer = pb.SharedPool()
        self._choice = choice
        self._directory = directory
        self._tell = tell
        self._told: set[tuple[str, Transport]] = set()
        self._measured = measured
        self._socket: PoolSocket | None = None
        self._nixl: NixlAgent | None = None
        self._pools: dict[str, PeerPool] = {}
        self._fetches: dict[str, asyncio.Task[PeerPool | str]] = {}
        """For each epoch whose pool is not mapped: the fetch that runs, or that failed a short while ago."""
        self._starting_nixl = asyncio.Lock()

    def share(self, epoch: str, descriptor: int) -> None:
        """Offer this worker's pool to others.

        Raises:
            OSError: the directory or the socket cannot be used.
        """
        self._socket = PoolSocket(open_directory(self._directory), epoch, descriptor)
        self.offer = pb.SharedPool(boot_id=boot_id(), epoch=epoch)

    def share_by_nixl(self, epoch: str, address: int, num_bytes: int) -> None:
        """Offer this worker's pool, which lies at an address of this process, to others by NIXL.

        Raises:
            NotSharedError: NIXL is not installed, or cannot start.
        """
        if self._nixl is not None:
            self._nixl.close()
        self._nixl = NixlAgent(epoch, self._measured)
        self.offer = self._nixl.offer(address, num_bytes)

    @property
    def mapped_epochs(self) -> set[str]:
        """The epochs of the workers whose pools are mapped."""
        return set(self._pools)

    async def choose(self, offer: pb.SharedPool) -> Intake:
        """Return how to take the blocks of a worker that has made this offer.

        Raises:
            NotSharedError: its pool cannot be mapped, and no other transport is allowed.
        """
        if self._choice == "grpc":
            return MESSAGES
        if self._choice == "nixl":
            return await self._connect(offer)
        try:
            pool = await self._map(offer)
        except NotSharedError as error:
            if self._choice == "shared":
                raise NotSharedError(
                    f"the pool of {offer.epoch or 'the peer'} cannot be mapped: {error}"
                ) from error
            self._tell_once(offer.epoch, "grpc", str(error))
            return MESSAGES
        return pool

    def require(self, transport: Transport) -> None:
        """Raise NotSharedError if a peer takes blocks by another transport than the only one allowed."""
        if self._choice in ("shared", "nixl") and transport != self._choice:
            verb = "map" if self._choice == "shared" else "read"
            raise NotSharedError(
                f"the other worker did not {verb} this pool, and --transport is {self._choice}"
            )

    async def _connect(self, offer: pb.SharedPool) -> NixlPool:
        async with self._starting_nixl:
            if self._nixl is None:
                # A worker that offers no pool can still read those of others.
                self._nixl = await asyncio.to_thread(NixlAgent, secrets.token_hex(16), self._measured)
        pool = self._nixl.connect(offer)
        self._tell_once(offer.epoch, "nixl", "")
        return pool

    async def _map(self, offer: pb.SharedPool) -> PeerPool:
        if not offer.boot_id:
            raise NotSharedError("it shares no pool")
        if offer.boot_id != boot_id():
            raise NotSharedError("it runs on another host")
        if (pool := self._pools.get(offer.epoch)) is not None:
            return pool
        if (fetch := self._fetches.get(offer.epoch)) is None:
            fetch = self._fetches[offer.epoch] = asyncio.create_task(self._fetch(offer.epoch))
        # All callers wait for one fetch, which goes on if one of them is cancelled.
        await asyncio.wait([fetch])
        if isinstance(outcome := fetch.result(), str):
            raise NotSharedError(outcome)
        return outcome

    async def _fetch(self, epoch: str) -> PeerPool | str:
        """Map a pool; return the problem if it cannot be mapped, which is remembered for a short while."""
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
        self._tell_once(epoch, "shared", "")
        return pool

    def _unmap(self, epoch: str) -> None:
        pool = self._pools.pop(epoch)
        asyncio.get_running_loop().remove_reader(pool.connection)
        pool.close()

    def _tell_once(self, epoch: str, transport: Transport, reason: str) -> None:
        if (epoch, transport) in self._told:
            return
        if len(self._told) == _MAX_TOLD:
            self._told.clear()
        self._told.add((epoch, transport))
        self._tell(epoch, transport, reason)

    def close(self) -> None:
        """Stop sharing the pool, and unmap those of others."""
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None
        if self._socket is not None:
            self._socket.close()
        for fetch in self._fetches.values():
            fetch.cancel()
        for epoch in self.mapped_epochs:
            self._unmap(epoch)


def agreed(*, is_shared: bool, is_nixl: bool) -> Transport:
    """Return the transport that a receiver's message names."""
    if not is_shared:
        return "grpc"
    return "nixl" if is_nixl else "shared"


MESSAGES = Messages()
MESSAGES_ONLY = Transports("grpc", Path())
"""The transports of a worker that shares nothing."""
