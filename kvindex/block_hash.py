"""The identity of a KV block: a hash over its tokens and everything before them.

::

    root      = HMAC-SHA256(cluster secret, "quire-kv-1" | TLV(descriptor) | TLV(tenant) | TLV(salt)?
                | TLV(adapter)?) truncated to 16 bytes; an empty salt or adapter is left out
    hash[i]   = SHA-256(hash[i-1] | tokens of block i as little-endian uint32), truncated to 16 bytes
    TLV       = tag (1 byte) | length (little-endian uint32) | bytes

Equal hashes thus mean equal tokens, equal prefix, equal model and layout, and equal scope. Fixed-width tokens
and tagged, length-prefixed fields make the encoding injective. Without the secret, a reader of the index
cannot test whether it contains a guessed prompt. The hash is cryptographic because collisions of a fast hash
can be constructed, and one prompt would then get another prompt's blocks.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple

HASH_BYTES = 16
_DOMAIN = b"quire-kv-1"
_DESCRIPTOR_TAG = 1
_TENANT_TAG = 2
_SALT_TAG = 3
_ADAPTER_TAG = 4


class CacheScope(NamedTuple):
    """The requests that may share blocks. Each part is hashed under its own tag, so no salt equals a tenant.

    Attributes:
        tenant: the authenticated tenant; empty where the cluster has no tenants.
        salt: a subdivision of the tenant that the client chose; may be empty.
        adapter: digest of the adapter's weights; empty without an adapter.
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""


SHARED = CacheScope()
"""The scope of a cluster without tenants."""


def root_hash(descriptor: bytes, secret: bytes, scope: CacheScope) -> bytes:
    """Return the parent of every first block within a scope.

    Args:
        descriptor: the layout of the blocks, see ``KvLayout.descriptor``.
        secret: the cluster's secret.
        scope: the requests that may share the blocks.
    """
    message = _DOMAIN + _field(_DESCRIPTOR_TAG, descriptor) + _field(_TENANT_TAG, scope.tenant.encode())
    if scope.salt:
        message += _field(_SALT_TAG, scope.salt.encode())
    if scope.adapter:
        message += _field(_ADAPTER_TAG, scope.adapter.encode())
    return hmac.digest(secret, message, "sha256")[:HASH_BYTES]


def _field(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of one full block.

    Raises:
        OverflowError: a token id does not fit in a uint32.
    """
    return hashlib.sha256(parent + _encode(token_ids)).digest()[:HASH_BYTES]


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of all full blocks of a prompt.

    Raises:
        OverflowError: a token id does not fit in a uint32.
    """
    width = 4 * block_size
    encoded = _encode(token_ids)
    sha256, hashes, parent = hashlib.sha256, [], root
    for start in range(0, len(encoded) - width + 1, width):
        parent = sha256(parent + encoded[start : start + width]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes


def _encode(token_ids: Sequence[int]) -> bytes:
    """Return the tokens as little-endian uint32, on machines of either byte order."""
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def revision(descriptor: bytes) -> str:
    """Return the short name of the revision of all workers whose blocks have this layout."""
    return hashlib.sha256(descriptor).hexdigest()[:8]


def fingerprint(descriptor: bytes, secret: bytes) -> str:
    """Return the hash of a test vector, which is equal in two processes only if all their hashes agree."""
    root = root_hash(descriptor, secret, CacheScope("fingerprint"))
    return block_hash(root, range(16)).hex()
