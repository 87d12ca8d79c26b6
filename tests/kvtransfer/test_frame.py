"""Frames: digests, and how many go into a message."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from quire.kvtransfer import frame as frames
from quire.kvtransfer.errors import DigestMismatchError
from quire.kvtransfer.frame import Frame
from quire.protos import kvtransfer_pb2 as pb

FRAME = Frame(5, b"0123456789abcdef", b"payload of a block")
PARTIAL = Frame(6, b"", b"payload of a block")


def wire(frame: Frame) -> pb.BlockFrame:
    (message,) = frames.to_proto([frame]).frames.frames
    return message


def test_the_digest_is_xxh3_seeded_with_the_hash() -> None:
    seed = int.from_bytes(b"01234567", "little")
    assert wire(FRAME).digest == xxhash.xxh3_64_intdigest(FRAME.payload, seed=seed)
    assert wire(PARTIAL).digest == xxhash.xxh3_64_intdigest(PARTIAL.payload)


@pytest.mark.parametrize("frame", [FRAME, PARTIAL])
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert frames.from_proto(pb.BlockFrame.FromString(wire(frame).SerializeToString())) == frame


@given(position=st.integers(0, len(FRAME.payload) - 1), flip=st.integers(1, 255))
def test_any_changed_byte_is_found(position: int, flip: int) -> None:
    message = wire(FRAME)
    changed = bytearray(message.payload)
    changed[position] ^= flip
    message.payload = bytes(changed)
    with pytest.raises(DigestMismatchError, match="block 5"):
        frames.from_proto(message)


@pytest.mark.parametrize("name", [b"", b"another hash ..."])
def test_right_bytes_under_a_wrong_name_are_found(name: bytes) -> None:
    message = wire(FRAME)
    message.block_hash = name
    with pytest.raises(DigestMismatchError):
        frames.from_proto(message)


@pytest.mark.parametrize(
    ("block_bytes", "num_blocks"), [(1 << 10, 2048), (1 << 20, 2), (3 << 20, 1), (64 << 20, 1)]
)
def test_messages_have_some_mib_and_one_block_at_least(block_bytes: int, num_blocks: int) -> None:
    assert frames.blocks_per_message(block_bytes) == num_blocks
