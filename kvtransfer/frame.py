"""The form of a block on the wire, and the check of its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from quire.kvtransfer.errors import DigestMismatchError
from quire.protos import kvtransfer_pb2

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

MESSAGE_BYTES = 2 << 20
"""Size that messages are filled up to.

Below 1 MiB the cost of each message shows; above 4 MiB is no faster.
"""


@dataclass(frozen=True, slots=True)
class Frame:
    """One block of a sequence.

    Attributes:
        index: position in the sequence's block table.
        block_hash: identity of a full block; empty for the last block if it is partial.
        payload: the block's bytes.
    """

    index: int
    block_hash: bytes
    payload: bytes


def digest(block_hash: bytes, payload: bytes) -> int:
    """Return XXH3-64 of the payload, seeded with the hash, so that a wrong hash also fails the check."""
    return xxh3_64_intdigest(payload, seed=int.from_bytes(block_hash[:8], "little"))


def blocks_per_message(block_bytes: int) -> int:
    """Return how many blocks fill a message of about ``MESSAGE_BYTES``; at least 1."""
    return max(1, MESSAGE_BYTES // block_bytes)


def to_proto(frames: Iterable[Frame]) -> kvtransfer_pb2.PushRequest:
    """Return the message that carries the frames, with their digests."""
    request = kvtransfer_pb2.PushRequest()
    add_to(request.frames.frames, frames)
    return request


def add_to(
    field: RepeatedCompositeFieldContainer[kvtransfer_pb2.BlockFrame], frames: Iterable[Frame]
) -> None:
    """Append the frames to a message's field, with their digests."""
    # Frames are built in place: protobuf copies a message, with its payload, when it is put into another.
    for frame in frames:
        field.add(
            index=frame.index,
            block_hash=frame.block_hash,
            digest=digest(frame.block_hash, frame.payload),
            payload=frame.payload,
        )


def from_proto(message: kvtransfer_pb2.BlockFrame) -> Frame:
    """Return the frame that a message carries, after checking its digest.

    Raises:
        DigestMismatchError: a byte of the payload or of the hash changed on the way.
    """
    # Each access to a bytes field copies it, so each is read once.
    frame = Frame(message.index, message.block_hash, message.payload)
    if digest(frame.block_hash, frame.payload) != message.digest:
        raise DigestMismatchError(f"block {frame.index} arrived with bytes that do not match its digest")
    return frame
