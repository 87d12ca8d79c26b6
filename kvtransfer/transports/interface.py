"""The interface that each transport implements.

The worker that receives blocks chooses the transport for each peer. Everything except the blocks' bytes, such
as tickets, credit, hashes and digests, is always sent in messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import NamedTuple, Protocol

from quire.kvtransfer.errors import NotSharedError
from quire.kvtransfer.frame import Frame, Transport
from quire.protos import kvtransfer_pb2 as pb

_MAX_TOLD = 1024


class OwnPool(NamedTuple):
    """The pool that a worker offers to others, with properties that may exclude a transport.

    Attributes:
        epoch: identifies the current start of the worker.
        address: address of the pool in this process.
        device: kind of device whose memory it is.
        is_divided: whether it is divided among several processes of the worker.
        has_secret: whether others must prove the cluster secret.
        has_tls: whether workers encrypt what they send to each other.
    """

    epoch: str
    address: int
    num_bytes: int
    device: str
    is_divided: bool
    has_secret: bool
    has_tls: bool


class Intake(Protocol):
    """Gets the bytes of one peer's blocks.

    Attributes:
        transport: the transport's name in metrics.
        executor: the executor that iterates over ``frames``; None means the event loop's default.
    """

    transport: Transport
    executor: Executor | None

    def frames(
        self, messages: Iterable[pb.BlockFrame], block_bytes: int, bare_bytes: int = 0, frame_bytes: int = 0
    ) -> Iterator[Frame]:
        """Yield the frames that messages describe, in order; called in a thread of ``executor``.

        Before a copy of a payload is used, ``Frame.check_copy`` must accept it.

        Raises:
            DigestMismatchError: the payload or the hash is not what was sent.
            ProtocolError: the block has neither ``block_bytes`` bytes nor the ``bare_bytes`` of a bare block
                (see ``KvShape``), or is not in the peer's pool.
            SenderGoneError: the peer has ended.
        """


class Transports(Protocol):
    """How one worker gets blocks from others, and others get blocks from it.

    Attributes:
        offer: this worker's pool; empty if others cannot reach it.
        allowed: the transports that it uses, in both directions.
    """

    offer: pb.SharedPool
    allowed: frozenset[Transport]

    async def choose(self, offer: pb.SharedPool) -> Intake:
        """Return the intake for the blocks of a worker that made this offer.

        Raises:
            NotSharedError: its pool cannot be reached, and no other transport is allowed.
        """

    def close(self) -> None:
        """Stop offering the pool, and release the pools of others."""


Tell = Callable[[str, Transport, str], None]
"""Called with the epoch of a worker, the transport that is used for it, and the reason."""


class ToldOnce:
    """Reports the transport that is used for a peer, unless it was reported before."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._told: set[tuple[str, Transport]] = set()

    def __call__(self, epoch: str, transport: Transport, reason: str) -> None:
        """Report the transport and the reason, once for each peer and transport."""
        if (epoch, transport) in self._told:
            return
        if len(self._told) == _MAX_TOLD:
            self._told.clear()
        self._told.add((epoch, transport))
        self._tell(epoch, transport, reason)


def agreed(transports: Transports, value: pb.Transport) -> Transport:
    """Return the transport that a receiver's message names.

    Raises:
        NotSharedError: this worker, which has the blocks, does not allow it.
        ProtocolError: there is no such transport.
    """
    transport = Transport.from_wire(value)
    if transport not in transports.allowed:
        names = " and ".join(sorted(transports.allowed))
        raise NotSharedError(f"the other worker takes blocks by {transport}, and this one allows {names}")
    return transport
