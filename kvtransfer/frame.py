"""The ways of a block to a receiver, its form on the wire, and the check of its bytes.

::

    messages        [ index | block_hash | digest | payload  ]      up to 2 MiB of blocks in a message
    shared, nixl    [ index | block_hash | digest | block_id ]      16 MiB: the receiver copies them itself

A message thus carries four blocks of 512 KiB, or names 32 of them. A block of more than 8 MiB, as models
with large states have, comes in several messages, each with a piece of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from quire.kvtransfer.errors import DigestMismatchError, ProtocolError
from quire.protos import kvtransfer_pb2

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

MESSAGE_BYTES = 2 << 20
"""Size up to which messages are filled with blocks.

Below 1 MiB, the fixed cost of each message matters. Above 4 MiB, transfers are no faster.
"""

PIECE_BYTES = 8 << 20
"""Most bytes of a block in one message; gRPC refuses messages above ``rpc.channels.MAX_MESSAGE_BYTES``."""

NAMED_BYTES = 16 << 20
"""Size of the blocks that one message names, if the receiver copies them out of the sender's pool.

With smaller messages, the fixed cost of each matters. With larger ones, the receiver begins to copy later.
"""

Buffer = bytes | memoryview


class Transport(StrEnum):
    """How the bytes of blocks reach a receiver; the values are the names in settings, metrics and logs."""

    MESSAGES = "messages"
    SHARED = "shared"
    NIXL = "nixl"

    @property
    def on_wire(self) -> kvtransfer_pb2.Transport:
        """The transport's value in messages."""
        value: kvtransfer_pb2.Transport = getattr(kvtransfer_pb2, f"TRANSPORT_{self.name}")
        return value

    @classmethod
    def from_wire(cls, value: kvtransfer_pb2.Transport) -> Transport:
        """Return the transport that a message names."""
        for transport in cls:
            if transport.on_wire == value:
                return transport
        raise ProtocolError(f"the other worker names a transport, {value}, that does not exist")


@dataclass(frozen=True, slots=True)
class Frame:
    """One block of a sequence.

    Attributes:
        index: position in the sequence's block table.
        block_hash: identity of a full block; empty for the last block if it is partial.
        payload: the block's bytes, or a piece of them.
        digest: at the sender, the digest of the payload if it is known. At the receiver, the digest that a
            copy must have if the payload is still in the sender's memory.
        block_id: at the sender, the block's id in a pool that the receiver may map.
        frame_ids: at the sender, the places of the parts of the block in this pool, if it is not one piece.
        bytes_left: at the sender, how many of the block's bytes come after this piece.
    """

    index: int
    block_hash: bytes
    payload: Buffer
    digest: int | None = field(default=None, compare=False)
    block_id: int | None = field(default=None, compare=False)
    frame_ids: Sequence[int] = field(default=(), compare=False)
    bytes_left: int = field(default=0, compare=False)

    def pieces(self, transport: Transport) -> Iterator[Frame]:
        """Yield the pieces in which messages carry the block; only a large one has several."""
        if transport is not Transport.MESSAGES or len(self.payload) <= PIECE_BYTES:
            yield self
            return
        known = self.digest if self.digest is not None else digest(self.block_hash, self.payload)
        view = memoryview(self.payload)
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            left = len(view) - start - len(piece)
            yield replace(self, payload=piece, digest=known, bytes_left=left)

    def check_copy(self, copied: Buffer) -> None:
        """Check a copy of the payload, if the payload could not be checked before it was copied.

        Raises:
            DigestMismatchError: the copy differs from the bytes for which the sender computed the digest.
        """
        if self.digest is not None:
            check(self, copied, self.digest)


def digest(block_hash: bytes, payload: Buffer) -> int:
    """Return XXH3-64 of the payload, seeded with the hash, so that a wrong hash also fails the check."""
    return xxh3_64_intdigest(payload, seed=int.from_bytes(block_hash[:8], "little"))


def check(frame: Frame, payload: Buffer, expected: int) -> None:
    """Raise DigestMismatchError unless the payload has the expected digest."""
    if digest(frame.block_hash, payload) != expected:
        raise DigestMismatchError(f"block {frame.index} arrived with bytes that do not match its digest")


def num_completed(messages: Iterable[kvtransfer_pb2.BlockFrame]) -> int:
    """Return how many blocks a message carries or names; a block counts with its last piece."""
    return sum(not each.bytes_left for each in messages)


def blocks_per_message(block_bytes: int, transport: Transport = Transport.MESSAGES) -> int:
    """Return how many blocks one message carries or names; at least 1."""
    return max(1, (MESSAGE_BYTES if transport is Transport.MESSAGES else NAMED_BYTES) // block_bytes)


def to_proto(
    frames: Iterable[Frame], transport: Transport = Transport.MESSAGES
) -> kvtransfer_pb2.PushRequest:
    """Return the message that carries the frames, with their digests."""
    request = kvtransfer_pb2.PushRequest()
    add_to(request.frames.frames, frames, transport)
    return request


def add_to(
    message: RepeatedCompositeFieldContainer[kvtransfer_pb2.BlockFrame],
    frames: Iterable[Frame],
    transport: Transport = Transport.MESSAGES,
) -> None:
    """Append the frames to a message's field, with their digests.

    The frames have the blocks' bytes if these are sent in messages, and otherwise their ids in the sender's
    pool.
    """
    # Frames are built in place, since protobuf copies a message, with its payload, into another one.
    for frame in frames:
        known = frame.digest if frame.digest is not None else digest(frame.block_hash, frame.payload)
        added = message.add(index=frame.index, block_hash=frame.block_hash, digest=known)
        added.bytes_left = frame.bytes_left
        if transport is Transport.MESSAGES:
            added.payload = bytes(frame.payload)
        elif frame.frame_ids:
            added.frame_ids.extend(frame.frame_ids)
        elif frame.block_id is not None:
            added.block_id = frame.block_id


def from_proto(message: kvtransfer_pb2.BlockFrame, payload: Buffer | None = None) -> Frame:
    """Return the frame that a message carries, after checking its digest.

    Args:
        message: the message.
        payload: the block's bytes; None: those in the message.

    Raises:
        DigestMismatchError: a byte of the payload or of the hash changed on the way.
    """
    # Each access to a bytes field copies it, so each is read once.
    frame = Frame(message.index, message.block_hash, message.payload if payload is None else payload)
    check(frame, frame.payload, message.digest)
    return frame
