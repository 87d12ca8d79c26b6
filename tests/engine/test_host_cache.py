"""Blocks in host memory: the order of evictions, the owners of host blocks, and the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.kvindex.kv_layout import KvShape

SHAPE = KvShape(1, 1, 4, 4, "float32")
CPU = torch.device("cpu")


@pytest.fixture
def host() -> HostCache:
    return HostCache(KvMemory(SHAPE, 3, CPU))


def add(host: HostCache, *names: bytes) -> list[int]:
    host_ids = host.allocate(len(names))
    for name, host_id in zip(names, host_ids, strict=True):
        host.add_block(name, host_id)
    return host_ids


@given(st.lists(st.sampled_from("abc"), max_size=6))
def test_a_chain_that_is_used_again_is_evicted_last_and_from_its_end(word: str) -> None:
    host = HostCache(KvMemory(SHAPE, 3, CPU))
    add(host, b"a", b"b", b"c")
    chain = [each.encode() for each in dict.fromkeys(word)]
    host.touch([*chain, b"absent"])
    untouched = [each for each in (b"a", b"b", b"c") if each not in chain]
    popped = [host.pop_oldest() for _ in range(3)]
    assert [each[0] for each in popped if each is not None] == untouched + chain[::-1]
    assert host.pop_oldest() is None


def test_an_evicted_block_belongs_to_the_caller_until_it_is_freed(host: HostCache) -> None:
    [first, *_] = add(host, b"a", b"b", b"c")
    assert host.num_free == 0
    assert host.pop_oldest() == (b"a", first)
    assert host.num_free == 0
    host.free([first])
    assert host.num_free == 1
    assert host.allocate(1) == [first]


def test_a_promoted_block_is_not_overwritten_before_the_step_has_copied_it(host: HostCache) -> None:
    add(host, b"a", b"b", b"c")
    host.pop_for_promotion(b"b")
    assert b"b" not in host
    assert host.num_free == 0
    host.end_step()
    assert host.num_free == 1


def test_a_discarded_block_is_free_at_once(host: HostCache) -> None:
    add(host, b"a")
    host.discard(b"absent")
    assert (len(host), host.num_free) == (1, 2)
    host.discard(b"a")
    assert (list(host), host.num_free) == ([], 3)


def test_bytes_are_restored_unchanged(host: HostCache) -> None:
    pool = KvMemory(SHAPE, 4, CPU)
    content = bytes(range(SHAPE.block_bytes))
    pool.write(1, content)
    [host_id] = add(host, b"a")
    host.copy_in(pool, 1, host_id)
    pool.write(1, bytes(SHAPE.block_bytes))
    assert bytes(host.payload(host_id)) == content
    host.copy_out(pool, [(host_id, 2)])
    assert pool.read(2) == content
    host.payload(host_id)[:3] = b"xyz"  # the disk reads into this memory
    host.copy_out(pool, [(host_id, 3)])
    assert pool.read(3) == b"xyz" + content[3:]
