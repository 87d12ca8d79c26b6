"""What is known of sealed blocks' tokens, apart from the engine."""

from __future__ import annotations

from array import array

from quire.engine.kv_cache.block_pool import BlockPool
from quire.engine.sequences.block_tokens import MAX_SIBLINGS, BlockTokens
from quire.engine.sequences.sequence import Sequence
from quire.kvindex.block_hash import block_hash
from quire.kvindex.publish_ledger import BlockContent
from quire.sampling.params import SamplingParams


def hold(pool: BlockPool, known: BlockTokens, token_ids: list[int]) -> int:
    """Seal and free a block of four tokens; return its id."""
    sequence = Sequence("r", token_ids, len(token_ids), SamplingParams(), b"root")
    sequence.extend_hashes(4)
    [block_id] = pool.allocate(1)
    pool.seal(block_id, sequence.block_hashes[0])
    known.remember(sequence, 0, 1, 4)
    pool.free([block_id])
    return block_id


def test_the_longest_match_is_found() -> None:
    pool = BlockPool(8)
    known = BlockTokens(pool)
    hold(pool, known, [1, 2, 9, 9])
    longest = hold(pool, known, [1, 2, 3, 9])
    hold(pool, known, [2, 2, 3, 4])
    assert known.find(b"root", [1, 2, 3, 4]) == (longest, 3)
    assert known.find(b"root", [1, 2, 3]) == (longest, 3)
    assert known.find(b"root", [5]) is known.find(b"other root", [1, 2, 3, 4]) is None


def test_an_evicted_block_is_not_found() -> None:
    pool = BlockPool(2)
    known = BlockTokens(pool)
    hold(pool, known, [1, 2, 3, 4])
    pool.allocate(2)
    assert known.find(b"root", [1, 2, 3, 4]) is None


def test_remembered_tokens_are_bounded() -> None:
    pool = BlockPool(4)
    known = BlockTokens(pool)
    for token in range(100):
        hold(pool, known, [token, 2, 3, 4])
        assert known.num_blocks <= 2 * pool.num_blocks
    assert known.find(b"root", [99, 2]) is not None
    assert known.find(b"root", [0, 2]) is None
    large = BlockPool(1000)
    known = BlockTokens(large)
    for token in range(2 * MAX_SIBLINGS):
        hold(large, known, [token, 2, 3, 4])
    assert known.num_blocks == MAX_SIBLINGS
    assert known.find(b"root", [2 * MAX_SIBLINGS - 1, 2]) is not None
    assert known.find(b"root", [0, 2]) is None


def test_the_tokens_of_blocks_are_reported_at_each_use() -> None:
    pool = BlockPool(2)
    told: list[tuple[bytes, BlockContent]] = []
    known = BlockTokens(pool, told.extend)
    for _ in range(2):
        hold(pool, known, [1, 2, 3, 4])
        pool.free(pool.allocate(2))  # evicts it
    expected = block_hash(b"root", [1, 2, 3, 4])
    assert told == [(expected, (b"root", array("I", [1, 2, 3, 4]), True))] * 2


def test_a_block_that_the_pool_lacks_is_not_reported() -> None:
    pool = BlockPool(2)
    told: list[tuple[bytes, BlockContent]] = []
    known = BlockTokens(pool, told.extend)
    sequence = Sequence("r", [*range(8)], 8, SamplingParams(), b"root")
    sequence.extend_hashes(4)
    pool.seal(pool.allocate(1)[0], sequence.block_hashes[0])
    known.remember(sequence, 0, 2, 4)
    assert [block_hash for block_hash, _ in told] == sequence.block_hashes[:1]
