"""The choice of workers."""

from __future__ import annotations

from random import Random

import pytest

from quire.routing.policy import (
    IMBALANCE_SECONDS,
    CandidateWorker,
    Estimate,
    Policy,
    affinity_key,
    choose_decode,
    choose_prefill,
    estimate,
    is_local_sooner,
)
from quire.routing.pulls import Blocks, Peer, Pulls, choose_pull

KEY = b"key"
BLOCKS = Blocks(16, 1 << 20)
RATE = 1000.0


def worker(name: str, cached: int = 0, pending: int = 0, **more: float) -> CandidateWorker:
    values = {"resident_tokens": 0, "capacity_tokens": 10_000, "tokens_per_second": RATE, **more}
    return CandidateWorker(name, cached, pending, **values)  # type: ignore[arg-type]


def estimates(candidates: list[CandidateWorker], num_tokens: int, *peers: Peer) -> list[Estimate]:
    return [estimate(each, num_tokens, peers, BLOCKS, Pulls.MEASURED) for each in candidates]


def prefill(
    candidates: list[CandidateWorker],
    *peers: Peer,
    num_tokens: int = 100,
    policy: Policy = Policy.PRECISE,
    key: bytes = KEY,
    rng: Random | None = None,
) -> tuple[str, str] | None:
    choice = choose_prefill(policy, estimates(candidates, num_tokens, *peers), key, rng or Random(0))
    return choice and (choice[0].candidate.worker_id, choice[1])


def decode(
    candidates: list[CandidateWorker], policy: Policy = Policy.PRECISE, rng: Random | None = None
) -> tuple[str, str] | None:
    choice = choose_decode(policy, candidates, 100, KEY, rng or Random(0))
    return choice and (choice[0].worker_id, choice[1])


def test_an_estimate_adds_queue_pull_and_computing() -> None:
    peer = Peer("peer", 100, 1e9)
    local = estimate(worker("a", 160, 500), 2000, [], BLOCKS, Pulls.MEASURED)
    assert (local.queue_seconds, local.compute_seconds, local.seconds) == (0.5, 1.84, 2.34)
    helped = estimate(worker("a", 160, 500), 2000, [peer], BLOCKS, Pulls.MEASURED)
    assert helped.peer is peer
    assert helped.pull_seconds == pytest.approx(0.005 + 90 * (1 << 20) / 1e9)
    assert helped.seconds == pytest.approx(0.5 + helped.pull_seconds + 0.4)
    assert helped.cached_tokens == 1600
    assert estimate(worker("peer", 1600), 2000, [peer], BLOCKS, Pulls.MEASURED).peer is None


def test_the_last_token_is_always_computed() -> None:
    assert estimate(worker("a", 160), 160, [], BLOCKS, Pulls.MEASURED).compute_seconds == 1 / RATE


@pytest.mark.parametrize("policy", Policy)
def test_without_workers_none_is_chosen(policy: Policy) -> None:
    assert prefill([], policy=policy) is None
    assert decode([], policy) is None


def test_the_longest_prefix_wins_among_idle_workers() -> None:
    assert prefill([worker("a"), worker("b", 64), worker("c", 32)]) == ("b", "prefix")


def test_load_decides_between_equal_prefixes() -> None:
    assert prefill([worker("a", 64, 50), worker("b", 64, 10)]) == ("b", "load")


def test_a_backlog_longer_than_the_prefix_sends_work_elsewhere() -> None:
    assert prefill([worker("holder", 64, 1000), worker("idle")]) == ("idle", "load")


def test_a_fast_worker_may_have_a_longer_queue() -> None:
    fast, slow = worker("fast", 0, 300, tokens_per_second=4000.0), worker("slow", 0, 100)
    assert prefill([fast, slow]) == ("fast", "load")


def test_an_idle_worker_that_can_copy_beats_a_busy_holder() -> None:
    candidates = [worker("holder", 1600, 1000), worker("idle")]
    assert prefill(candidates, Peer("holder", 100, 1e9), num_tokens=1700) == ("idle", "pull")
    assert prefill(candidates, Peer("holder", 100, 5e7), num_tokens=1700) == ("holder", "prefix")


def test_an_overloaded_holder_is_not_chosen_even_for_a_long_prefix() -> None:
    jam = int(IMBALANCE_SECONDS * RATE) + 1
    holder, idle = worker("holder", 9000, jam), worker("idle")
    assert prefill([holder, idle], num_tokens=9001) == ("idle", "imbalance")
    assert prefill([holder._replace(pending_tokens=jam - 2), idle], num_tokens=9001) == ("holder", "prefix")
    assert prefill([holder, worker("busy", 0, jam)], num_tokens=9001) == ("holder", "prefix")


def test_equal_workers_share_prompts_but_keep_a_prefix_together() -> None:
    workers = [worker(name) for name in "abc"]
    keys = [bytes([number]) * 16 for number in range(60)]
    chosen = [prefill(workers, key=key) for key in keys]
    assert chosen == [prefill(workers[::-1], key=key) for key in keys]
    assert {choice[0] for choice in chosen if choice} == {"a", "b", "c"}
    assert {choice[1] for choice in chosen if choice} == {"tie"}


def test_of_equal_costs_the_one_that_holds_most_is_taken() -> None:
    assert prefill([worker("a", 32), worker("b", 48), worker("c")], num_tokens=10_000) == ("b", "prefix")


def test_prompts_with_the_same_first_blocks_share_a_key() -> None:
    hashes = [bytes([number]) * 16 for number in range(20)]
    assert affinity_key(hashes) == affinity_key(hashes[:16]) != affinity_key(hashes[:15])
    assert affinity_key([]) == b""


def test_load_knows_no_prefixes() -> None:
    rng, workers = Random(1), [worker("a", 96), worker("b")]
    assert {prefill(workers, policy=Policy.LOAD, rng=rng)[0] for _ in range(40)} == {"a", "b"}  # type: ignore[index]
    assert {decode(workers, Policy.LOAD, rng)[0] for _ in range(40)} == {"a", "b"}  # type: ignore[index]


def test_load_takes_the_shortest_queue() -> None:
    assert prefill([worker("a", 96, 50), worker("b")], policy=Policy.LOAD) == ("b", "load")
    assert decode([worker("a", 96, resident_tokens=50), worker("b")], Policy.LOAD) == ("b", "load")


@pytest.mark.parametrize("policy", Policy)
def test_an_unhealthy_worker_never_prefills_and_decodes_only_when_no_other_can(policy: Policy) -> None:
    failed, other = worker("a", 64, is_unhealthy=True), worker("b", 0, 500, resident_tokens=500)
    assert prefill([failed, other], policy=policy) == ("b", "only")
    assert prefill([failed], policy=policy) is None
    assert decode([failed, other], policy) == ("b", "only")
    assert decode([failed], policy) == ("a", "only")


def test_overlap_counts_half_for_decode() -> None:
    holder, idle = worker("a", 64, resident_tokens=40), worker("b")
    assert decode([holder, idle]) == ("b", "load")
    assert decode([holder._replace(resident_tokens=20), idle]) == ("a", "prefix")


def test_the_larger_pool_keeps_more() -> None:
    large = worker("large", resident_tokens=1000, capacity_tokens=100_000)
    assert decode([worker("small", resident_tokens=900), large]) == ("large", "load")


def test_a_full_worker_decodes_only_when_all_are() -> None:
    full = worker("full", 96, resident_tokens=950, capacity_tokens=1000)
    assert decode([full, worker("b", resident_tokens=9000)]) == ("b", "only")
    assert decode([full, full._replace(worker_id="fuller", resident_tokens=1500)]) == ("full", "load")


@pytest.mark.parametrize(
    ("cached", "running", "remote_cached", "is_local"),
    [
        (90, 0, 0, True),  # 10 ms here, 105 ms there
        (90, 0, 96, False),  # 10 ms here, 9 ms there
        (40, 0, 0, False),  # more than a decode worker may compute
        (90, 9, 0, True),  # stalls nine for 10 ms
        (90, 11, 0, False),
    ],
)
def test_a_short_rest_is_computed_where_it_is_decoded(
    cached: int, running: int, remote_cached: int, is_local: bool
) -> None:
    local, remote = estimates([worker("d", cached), worker("p", remote_cached)], 100)
    assert is_local is is_local_sooner(
        local, remote, handoff_seconds=0.005, num_running=running, max_tokens=16
    )


def pull_of(
    own_tokens: int, *peers: Peer, tokens_per_second: float = 1000.0, pulls: Pulls = Pulls.MEASURED
) -> tuple[str, int] | None:
    pull = choose_pull(own_tokens, peers, BLOCKS, tokens_per_second, pulls)
    return pull and (pull[0].worker_id, pull[0].num_blocks)


def test_blocks_are_pulled_where_that_is_faster_than_computing() -> None:
    peer = Peer("peer", 100, 1e9)
    assert pull_of(0, peer) == ("peer", 100)
    assert pull_of(0, peer, tokens_per_second=1e5) is None
    assert pull_of(0, Peer("slow", 100, 1e7)) is None


def test_blocks_that_are_there_and_few_blocks_are_not_pulled() -> None:
    peer = Peer("peer", 100, 1e9)
    assert pull_of(1600, peer) is None
    assert pull_of(1600 - 3 * 16, peer) is None
    assert pull_of(1600 - 4 * 16, peer) == ("peer", 100)
    assert pull_of(1600, Peer("behind", 50, 1e9)) is None
    assert pull_of(0) is None


def test_the_pull_that_saves_most_is_taken() -> None:
    assert pull_of(0, Peer("near", 50, 1e10), Peer("far", 100, 1e9)) == ("far", 100)
    assert pull_of(0, Peer("slow", 100, 1e8), Peer("fast", 100, 1e9)) == ("fast", 100)


def test_pulls_can_be_forbidden() -> None:
    assert pull_of(0, Peer("peer", 100, 1e9), pulls=Pulls.NEVER) is None
