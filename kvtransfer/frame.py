"""The form of a block on the wire, and the check of its bytes.

::

    messages        [ index | block_hash | digest | payload  ]      up to 2 MiB of blocks in a message
    shared, nixl    [ index | block_hash | digest | block_id ]      16 MiB: the receiver copies them itself

A block of 512 KiB thus travels with three others in a message, or is named with 31 others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from quire.kvtransfer.errors import DigestMismatchError
from quire.kvtransfer.transports.transport import Transport
from quire.protos import kvtransfer_pb2

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

MESSAGE_BYTES = 2 << 20
"""Size that messages are filled up to.

Below 1 MiB the cost of each message shows; above 4 MiB is no faster.
"""

NAMED_BYTES = 16 << 20
"""Size of the blocks that one message names, if the receiver copies them out of the sender's pool.

Smaller messages cost more each; with larger ones the receiver copies later than it could.
"""

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One block of a sequence.

    Attributes:
        index: position in the sequence's block table.
        block_hash: identity of a full block; empty for the last block if it is partial.
        payload: the block's bytes.
        digest: at the sender, the digest of the payload if it is known. At the receiver, the digest that a
            copy of the payload must have, if the payload is still the sender's memory.
        block_id: at the sender, the block's place in a pool that the receiver may map.
    """

    index: int
    block_hash: bytes
    payload: Buffer
    digest: int | None = field(default=None, compare=False)
    block_id: int | None = field(default=None, compare=False)

    def check_copy(self, copied: Buffer) -> None:
        """Check a copy of the payload, if the payload could not be checked before it was copied.

        Raises:
            DigestMismatchError: the copy differs from the bytes that the sender computed the digest of.
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


def blocks_per_message(block_bytes: int, transport: Transport = Transport.MESSAGES) -> int:
    """Return how many blocks fill a message, or are named by it; at least 1."""
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

    They have the blocks' bytes if these are sent in messages, else the blocks' places in the sender's pool.
    """
    # Frames are built in place: protobuf copies a message, with its payload, when it is put into another.
    for frame in frames:
        known = frame.digest if frame.digest is not None else digest(frame.block_hash, frame.payload)
        added = message.add(index=frame.index, block_hash=frame.block_hash, digest=known)
        if transport is Transport.MESSAGES:
            added.payload = bytes(frame.payload)
        elif frame.block_id is not None:
            added.block_id = frame.block_id


def from_proto(message: kvtransfer_pb2.BlockFrame) -> Frame:
    """Return the frame that a message carries, after checking its digest.

    Raises:
        DigestMismatchError: a byte of the payload or of the hash changed on the way.
    """
    # Each access to a bytes field copies it, so each is read once.
    frame = Frame(message.index, message.block_hash, message.payload)
    check(frame, frame.payload, message.digest)
    return frame
