"""Block hashes: fixed vectors, chaining, scopes, speed."""

from __future__ import annotations

import json
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.kvindex.block_hash import SHARED, CacheScope, block_hash, block_hashes, fingerprint, root_hash
from quire.kvindex.kv_layout import KvLayout
from tests.testing.commands import run_command

DESCRIPTOR = KvLayout(4, 2, 16, 32, "bfloat16", "model", "bfloat16", "float32-1").descriptor()
VECTORS = json.loads(Path(__file__).with_name("block_hash_vectors.json").read_text(encoding="utf-8"))
scopes = st.builds(CacheScope, *(st.text(max_size=20) for _ in CacheScope._fields))
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["case"])
def test_golden_vectors(vector: dict[str, Any]) -> None:
    descriptor, secret = vector["descriptor"].encode(), bytes.fromhex(vector["secret_hex"])
    root = root_hash(descriptor, secret, CacheScope(vector["scope"], vector.get("salt", "")))
    assert root.hex() == vector["root_hex"]
    hashes = block_hashes(root, vector["token_ids"], vector["block_size"])
    assert [each.hex() for each in hashes] == vector["block_hashes_hex"]
    assert fingerprint(descriptor, secret) == vector["fingerprint"]


@pytest.mark.parametrize("seed", ["0", "random"])
def test_another_process_agrees(seed: str) -> None:
    program = (
        "import sys\n"
        "from quire.kvindex.block_hash import *\n"
        "root = root_hash(sys.argv[1].encode(), b'secret', CacheScope('tenant'))\n"
        "print(*(h.hex() for h in block_hashes(root, range(40), 16)))\n"
    )
    command = sys.executable, "-c", program, VECTORS[0]["descriptor"]
    answer = run_command(*command, variables={"PYTHONHASHSEED": seed})
    assert answer.stdout.split() == VECTORS[0]["block_hashes_hex"]


@given(tokens, tokens, st.integers(1, 20))
def test_hashes_agree_exactly_where_prefixes_do(a: list[int], b: list[int], block_size: int) -> None:
    root = root_hash(DESCRIPTOR, b"", SHARED)
    hashes_a, hashes_b = block_hashes(root, a, block_size), block_hashes(root, b, block_size)
    for index, (hash_a, hash_b) in enumerate(zip(hashes_a, hashes_b, strict=False)):
        end = (index + 1) * block_size
        assert (hash_a == hash_b) == (a[:end] == b[:end])


@given(tokens, st.integers(1, 20))
def test_one_by_one_is_the_same(token_ids: list[int], block_size: int) -> None:
    parent = root_hash(DESCRIPTOR, b"", SHARED)
    hashes = block_hashes(parent, token_ids, block_size)
    assert len(hashes) == len(token_ids) // block_size
    assert hashes == block_hashes(parent, array("I", token_ids), block_size)
    for index, expected in enumerate(hashes):
        parent = block_hash(parent, token_ids[index * block_size : (index + 1) * block_size])
        assert parent == expected


@given(scopes, scopes, tokens.filter(bool))
@example(CacheScope("acme", ""), CacheScope("", "acme"), [1])
@example(CacheScope("acme", "x"), CacheScope("acmex", ""), [1])
def test_scopes_never_share_a_block(a: CacheScope, b: CacheScope, token_ids: list[int]) -> None:
    in_a, in_b = (set(block_hashes(root_hash(DESCRIPTOR, b"secret", s), token_ids, 1)) for s in (a, b))
    assert (in_a == in_b) == (a == b)
    assert a == b or not in_a & in_b


def test_secret_scope_and_descriptor_separate() -> None:
    other = KvLayout(4, 2, 16, 64, "bfloat16", "model", "bfloat16", "float32-1").descriptor()
    roots = {
        root_hash(DESCRIPTOR, b"", SHARED),
        root_hash(DESCRIPTOR, b"x", SHARED),
        root_hash(DESCRIPTOR, b"", CacheScope("x")),
        root_hash(DESCRIPTOR, b"", CacheScope("", "x")),
        root_hash(other, b"", SHARED),
        root_hash(DESCRIPTOR + b"x", b"", SHARED),
    }
    assert len(roots) == 6


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_tokens_are_never_cut(token_id: int) -> None:
    with pytest.raises(OverflowError):
        block_hash(b"parent", [token_id])
