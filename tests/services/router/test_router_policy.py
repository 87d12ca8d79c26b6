"""The choice of workers."""

from __future__ import annotations

import pytest

from quire.services.router.policy import (
    Candidate,
    Choice,
    Peer,
    affinity_key,
    choose_decode,
    choose_prefill,
    choose_pull,
    needs_prefill_worker,
)

KEY = b"key"


def test_nobody_is_chosen_of_none() -> None:
    assert choose_prefill([], 10, KEY) is None
    assert choose_decode([], 10, KEY) is None


def test_the_longest_prefix_wins_among_idle_workers() -> None:
    workers = [Candidate("a", 0, 0), Candidate("b", 64, 0), Candidate("c", 32, 0)]
    assert choose_prefill(workers, 100, KEY) == Choice("b", 64, "prefix")


def test_load_breaks_ties_of_the_prefix() -> None:
    workers = [Candidate("a", 64, 50), Candidate("b", 64, 10)]
    assert choose_prefill(workers, 100, KEY) == Choice("b", 64, "load")


def test_a_backlog_longer_than_the_prefix_sends_work_elsewhere() -> None:
    workers = [Candidate("holder", 64, 1000), Candidate("idle", 0, 0)]
    choice = choose_prefill(workers, 100, KEY)
    assert choice == Choice("idle", 0, "load")


def test_equal_workers_share_prompts_but_keep_a_prefix_together() -> None:
    workers = [Candidate(name, 0, 0) for name in "abc"]
    prompts = [[number] * 40 for number in range(60)]
    chosen = [choose_prefill(workers, 40, affinity_key(prompt, 4)) for prompt in prompts]
    again = [choose_prefill(workers[::-1], 40, affinity_key(prompt, 4)) for prompt in prompts]
    assert chosen == again
    assert {choice.worker_id for choice in chosen if choice} == {"a", "b", "c"}
    assert all(choice.reason == "tie" for choice in chosen if choice)


def test_prompts_with_the_same_first_blocks_share_a_key() -> None:
    prefix = list(range(64))
    assert affinity_key([*prefix, 1], 4) == affinity_key([*prefix, 2, 3], 4)
    assert affinity_key([*prefix[:-1], 9], 4) != affinity_key(prefix, 4)


def test_a_shunned_worker_decodes_only_when_no_other_can() -> None:
    failed, other = Candidate("a", 64, 0, is_shunned=True), Candidate("b", 0, 500)
    assert choose_decode([failed, other], 100, KEY) == Choice("b", 0, "only")
    assert choose_decode([failed], 100, KEY) == Choice("a", 64, "only")


def test_a_shunned_worker_prefills_nothing() -> None:
    failed, other = Candidate("a", 64, 0, is_shunned=True), Candidate("b", 0, 500)
    assert choose_prefill([failed, other], 100, KEY) == Choice("b", 0, "only")
    assert choose_prefill([failed], 100, KEY) is None


def test_overlap_counts_half_for_decode() -> None:
    busy_holder, idle = Candidate("a", 64, 40), Candidate("b", 0, 0)
    choice = choose_decode([busy_holder, idle], 100, KEY)
    assert choice is not None
    assert choice.worker_id == "b"
    choice = choose_decode([busy_holder._replace(load_tokens=20), idle], 100, KEY)
    assert choice == Choice("a", 64, "prefix")


@pytest.mark.parametrize(("cached", "limit", "needed"), [(0, 0, True), (90, 16, False), (80, 16, True)])
def test_short_rests_need_no_prefill_worker(cached: int, limit: int, needed: bool) -> None:
    assert needs_prefill_worker(Choice("d", cached, "only"), 100, limit) is needed


def pull_of(own_tokens: int, *peers: Peer, tokens_per_second: float = 1000.0) -> tuple[str, int] | None:
    pull = choose_pull(
        own_tokens, peers, block_size=16, block_bytes=1 << 20, tokens_per_second=tokens_per_second
    )
    return pull and (pull.worker_id, pull.num_blocks)


def test_blocks_are_pulled_where_that_is_faster_than_computing() -> None:
    peer = Peer("peer", 1600, 1e9)
    assert pull_of(0, peer) == ("peer", 100)
    assert pull_of(0, peer, tokens_per_second=1e5) is None
    assert pull_of(0, Peer("slow", 1600, 1e7)) is None


def test_blocks_that_are_there_and_few_blocks_are_not_pulled() -> None:
    peer = Peer("peer", 1600, 1e9)
    assert pull_of(1600, peer) is None
    assert pull_of(1600 - 3 * 16, peer) is None
    assert pull_of(1600 - 4 * 16, peer) == ("peer", 100)
    assert pull_of(1600, Peer("behind", 800, 1e9)) is None
    assert pull_of(0) is None


def test_the_pull_that_saves_most_is_taken() -> None:
    assert pull_of(0, Peer("near", 800, 1e10), Peer("far", 1600, 1e9)) == ("far", 100)
    assert pull_of(0, Peer("slow", 1600, 1e8), Peer("fast", 1600, 1e9)) == ("fast", 100)
