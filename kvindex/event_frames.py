"""KV events in vLLM's form: ZeroMQ frames around batches in msgpack.

::

    live      topic | number of the batch, 8 bytes | batch
    replayed  identity | empty | topic | number of the batch | batch, and at the end number -1 without a batch
    batch     [seconds since 1970, [event, ...], rank]

An event is a map whose ``type`` names it. Gateways compute hashes of their own from the tokens, so ours only
need to be equal where blocks are: they are sent as integers of 8 bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from quire.kvindex.publish_ledger import BlockContent

Event = dict[str, Any]

MEDIUM = "GPU"
"""What vLLM calls the fastest tier. An event says whether a block is in any tier of the worker."""
RANK = 0
CLEARED: Event = {"type": "AllBlocksCleared"}
END = (-1).to_bytes(8, "big", signed=True)


def live_frames(topic: bytes, number: int, batch: bytes) -> list[bytes]:
    """Return the message of a batch to all subscribers."""
    return [topic, number.to_bytes(8, "big"), batch]


def replayed_frames(identity: bytes, topic: bytes, number: int, batch: bytes) -> list[bytes]:
    """Return the message of a batch to one subscriber that asked for it."""
    return [identity, b"", *live_frames(topic, number, batch)]


def end_frames(identity: bytes) -> list[bytes]:
    """Return the message that ends a replay."""
    return [identity, b"", b"", END, b""]


def encode_batch(seconds: float, events: Sequence[Event]) -> bytes:
    """Return a batch of events that happened at a time, in seconds since 1970."""
    return bytes(msgpack.packb([seconds, events, RANK]))


def removed_event(block_hashes: Sequence[bytes]) -> Event:
    """Return the event of blocks that no prompt finds any more."""
    return {"type": "BlockRemoved", "block_hashes": [*map(public_hash, block_hashes)], "medium": MEDIUM}


def stored_events(blocks: Sequence[tuple[bytes, BlockContent]], shared_root: bytes) -> list[Event]:
    """Return an event for each run of consecutive blocks of a prompt.

    Args:
        blocks: parents before children.
        shared_root: root hash of the scope that belongs to no tenant and has no salt.
    """
    return [_stored_event(run, shared_root) for run in _runs(blocks)]


def public_hash(block_hash: bytes) -> int:
    """Return what stands for a block's hash; 0 would stand for no block."""
    return int.from_bytes(block_hash[-8:], "big") or 1


def _runs(blocks: Sequence[tuple[bytes, BlockContent]]) -> Iterator[list[tuple[bytes, BlockContent]]]:
    run: list[tuple[bytes, BlockContent]] = []
    for block_hash, content in blocks:
        if run and content.parent_hash != run[-1][0]:
            yield run
            run = []
        run.append((block_hash, content))
    if run:
        yield run


def _stored_event(run: Sequence[tuple[bytes, BlockContent]], shared_root: bytes) -> Event:
    first = run[0][1]
    event: Event = {
        "type": "BlockStored",
        "block_hashes": [public_hash(block_hash) for block_hash, _ in run],
        "parent_block_hash": None if first.begins_prompt else public_hash(first.parent_hash),
        "token_ids": [token_id for _, content in run for token_id in content.token_ids],
        "block_size": len(first.token_ids),
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
    }
    if first.begins_prompt and first.parent_hash != shared_root:
        event["extra_keys"] = [[_scope_key(first.parent_hash)], *[None] * (len(run) - 1)]
    return event


def _scope_key(root_hash: bytes) -> str:
    """Return a key that separates the blocks of a scope; the root itself would let readers test guesses.

    The prefix is Dynamo's for namespaces. Other gateways only see that a prompt without a key differs.
    """
    return "dynamo-cache-salt:" + hashlib.sha256(b"kv-events" + root_hash).hexdigest()[:16]
