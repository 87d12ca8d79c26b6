"""A block on the wire, and how its bytes are checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from quire.kvtransfer.errors import DigestMismatchError
from quire.protos import kvtransfer_pb2

MESSAGE_BYTES = 2 << 20
"""Size that messages are filled up to: below 1 MiB a message costs, above 4 MiB nothing is won."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One block of a sequence.

    Attributes:
        index: place in the sequence's block table.
        block_hash: identity of a full block; empty for the partial last one.
        payload: the block's bytes.
    """

    index: int
    block_hash: bytes
    payload: bytes


def digest(block_hash: bytes, payload: bytes) -> int:
    """Return XXH3-64 of the payload, seeded with the hash: right bytes under a wrong name do not pass."""
    return xxh3_64_intdigest(payload, seed=int.from_bytes(block_hash[:8], "little"))


def to_proto(frame: Frame) -> kvtransfer_pb2.BlockFrame:
    """Return the wire form, with its digest."""
    return kvtransfer_pb2.BlockFrame(
        index=frame.index,
        block_hash=frame.block_hash,
        digest=digest(frame.block_hash, frame.payload),
        payload=frame.payload,
    )


def from_proto(message: kvtransfer_pb2.BlockFrame) -> Frame:
    """Read and check the wire form.

    Raises:
        DigestMismatchError: a byte of the payload or of the hash changed on the way.
    """
    if digest(message.block_hash, message.payload) != message.digest:
        raise DigestMismatchError(f"block {message.index} arrived with bytes that do not match its digest")
    return Frame(message.index, message.block_hash, message.payload)


def messages(frames: Iterable[Frame], block_bytes: int) -> Iterator[list[Frame]]:
    """Group frames into messages of about ``MESSAGE_BYTES``, one block at least."""
    per_message = max(1, MESSAGE_BYTES // block_bytes)
    group: list[Frame] = []
    for frame in frames:
        group.append(frame)
        if len(group) == per_message:
            yield group
            group = []
    if group:
        yield group
