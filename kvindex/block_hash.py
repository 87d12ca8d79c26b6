"""The identity of a KV block: a hash over its tokens and everything before them.

::

    root      = HMAC-SHA256(cluster secret, "quire-kv-1" | TLV(descriptor) | TLV(scope))   cut to 16 bytes
    hash[i]   = SHA-256(hash[i-1] | tokens of block i as little-endian uint32)             cut to 16 bytes

Equal hashes thus mean equal tokens, equal prefix, equal model and layout, and equal scope. Fixed-width tokens
and length-prefixed fields make the encoding injective. The secret keeps a reader of the index from testing
guessed prompts. A fast hash would do for speed, but its collisions can be made, and would serve one prompt's
blocks to another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class CacheDescriptor:
    """What must be equal for two workers' blocks to be interchangeable."""

    model_digest: str
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    def to_bytes(self) -> bytes:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


def root_hash(descriptor: bytes, secret: bytes, scope: str) -> bytes:
    """Return the parent of every first block within a scope, such as a tenant."""
    message = b"quire-kv-1" + _field(descriptor) + _field(scope.encode())
    return hmac.digest(secret, message, "sha256")[:HASH_BYTES]


def _field(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of one full block."""
    tokens = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.sha256(parent + tokens).digest()[:HASH_BYTES]


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of all full blocks of a prompt."""
    num_blocks = len(token_ids) // block_size
    tokens = struct.pack(f"<{num_blocks * block_size}I", *token_ids[: num_blocks * block_size])
    hashes, parent, width = [], root, 4 * block_size
    for index in range(num_blocks):
        parent = hashlib.sha256(parent + tokens[index * width : (index + 1) * width]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes


def fingerprint(descriptor: bytes, secret: bytes) -> str:
    """Return a test vector's hash: equal on two processes exactly if all their hashes are."""
    root = root_hash(descriptor, secret, "fingerprint")
    return block_hash(root, range(16)).hex()
