"""The bytes of KV events."""

from __future__ import annotations

from array import array

import msgpack

from quire.kvindex.event_frames import (
    CLEARED,
    encode_batch,
    end_frames,
    live_frames,
    public_hash,
    removed_event,
    replayed_frames,
    stored_events,
)
from quire.kvindex.publish_ledger import BlockContent

SHARED, TENANT = b"shared root.....", b"tenant's root..."
A, B, C, D = (bytes([n]) * 16 for n in (1, 2, 3, 4))
# What msgspec, vLLM's encoder, writes for the same values in structs with the fields of vLLM 0.32.
GOLDEN = (
    "93cb3ff80000000000009389a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf0101010101010101"
    "cf0202020202020202b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f7369"
    "7a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291KEYc083a4"
    "74797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf0303030303030303a66d656469756da347505581"
    "a474797065b0416c6c426c6f636b73436c656172656400"
)


def content(parent: bytes, *token_ids: int, begins: bool = False) -> BlockContent:
    return BlockContent(parent, array("I", token_ids), begins)


def test_the_bytes_are_those_of_vllm() -> None:
    blocks = [(A, content(TENANT, 1, 2, begins=True)), (B, content(A, 3, 4))]
    stored = stored_events(blocks, SHARED)
    [[key], rest] = stored[0]["extra_keys"]
    assert rest is None
    golden = bytes.fromhex(GOLDEN.replace("KEY", msgpack.packb(key).hex()))
    assert encode_batch(1.5, [*stored, removed_event([C]), CLEARED]) == golden


def test_each_run_of_consecutive_blocks_is_one_event() -> None:
    blocks = [
        (A, content(SHARED, 1, 2, begins=True)),
        (B, content(A, 3, 4)),
        (D, content(A, 5, 6)),
        (C, content(SHARED, 7, 8, begins=True)),
    ]
    events = stored_events(blocks, SHARED)
    assert [event["block_hashes"] for event in events] == [
        [public_hash(A), public_hash(B)],
        [public_hash(D)],
        [public_hash(C)],
    ]
    assert [event["parent_block_hash"] for event in events] == [None, public_hash(A), None]
    assert [event["token_ids"] for event in events] == [[1, 2, 3, 4], [5, 6], [7, 8]]
    assert not any("extra_keys" in event for event in events)


def test_scopes_have_different_keys_which_are_not_their_roots() -> None:
    keys = []
    for root in (TENANT, b"another root...."):
        [event] = stored_events([(A, content(root, 1, 2, begins=True))], SHARED)
        [[key]] = event["extra_keys"]
        assert key.startswith("dynamo-cache-salt:")
        assert root.hex() not in key
        keys.append(key)
    assert keys[0] != keys[1]


def test_a_hash_is_never_zero() -> None:
    assert public_hash(bytes(16)) == 1
    assert public_hash(bytes(15) + b"\x02") == 2


def test_the_frames_of_a_replay_contain_those_of_the_live_message() -> None:
    assert live_frames(b"topic", 258, b"batch") == [b"topic", bytes([0, 0, 0, 0, 0, 0, 1, 2]), b"batch"]
    assert replayed_frames(b"who", b"topic", 258, b"batch")[2:] == live_frames(b"topic", 258, b"batch")
    assert end_frames(b"who") == [b"who", b"", b"", b"\xff" * 8, b""]
