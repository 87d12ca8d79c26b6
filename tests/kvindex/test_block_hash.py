"""Block hashes: fixed vectors, chaining, scopes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.kvindex.block_hash import CacheDescriptor, block_hash, block_hashes, fingerprint, root_hash

DESCRIPTOR = CacheDescriptor("model", 4, 2, 16, 32, "bfloat16").to_bytes()
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_golden_vectors() -> None:
    root = root_hash(DESCRIPTOR, b"secret", "tenant")
    hashes = block_hashes(root, range(40), 16)
    assert root.hex() == "5c51de0a86ba2118a8f439dc22d635e3"
    assert [h.hex() for h in hashes] == [
        "d0ad125002cc988059450bf1ee3ee7b0",
        "997677071c5f3cbac51da6891faa1934",
    ]
    assert fingerprint(DESCRIPTOR, b"secret") == "dd6c6ed8d94e04f909d65e74a2c2df93"


@given(tokens, tokens, st.integers(1, 20))
def test_hashes_agree_exactly_where_prefixes_do(a: list[int], b: list[int], block_size: int) -> None:
    root = root_hash(DESCRIPTOR, b"", "")
    hashes_a, hashes_b = block_hashes(root, a, block_size), block_hashes(root, b, block_size)
    for index, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        end = (index + 1) * block_size
        assert (hash_a == hash_b) == (a[:end] == b[:end])


@given(tokens, st.integers(1, 20))
def test_one_by_one_is_the_same(token_ids: list[int], block_size: int) -> None:
    parent = root_hash(DESCRIPTOR, b"", "")
    for index, expected in enumerate(block_hashes(parent, token_ids, block_size)):
        parent = block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])
        assert parent == expected


def test_secret_scope_and_descriptor_separate() -> None:
    other = CacheDescriptor("model", 4, 2, 16, 64, "bfloat16").to_bytes()
    roots = {
        root_hash(DESCRIPTOR, b"", ""),
        root_hash(DESCRIPTOR, b"x", ""),
        root_hash(DESCRIPTOR, b"", "x"),
        root_hash(other, b"", ""),
        root_hash(DESCRIPTOR + b"x", b"", ""),
    }
    assert len(roots) == 5
