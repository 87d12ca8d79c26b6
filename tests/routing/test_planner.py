"""What the router learns, and how that changes where requests go."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from quire.routing.placement import (
    FAILED_PULL_SECONDS,
    IN_FLIGHT_SECONDS,
    PREFILL_TOKENS_PER_SECOND,
    Placement,
    PlannedPrompt,
    Planner,
    PolicyConfig,
    PullOutcome,
    TooLateError,
)
from quire.routing.policy import CandidateWorker
from quire.routing.pulls import Blocks
from quire.routing.rates import HALF_LIFE_SECONDS
from tests.testing.manual_clock import ManualClock

BLOCKS = Blocks(16, 1 << 20)
LENGTH = 1600


def worker(name: str, num_blocks: int = 1000, **state: Any) -> CandidateWorker:
    return CandidateWorker(name, capacity_tokens=num_blocks * BLOCKS.tokens, **state)


def hashes(number: int, count: int = 100) -> list[bytes]:
    return [number.to_bytes(8, "big") + index.to_bytes(8, "big") for index in range(count)]


def prompt(
    number: int = 0, cached: dict[str, int] | None = None, *, is_indexed: bool = True
) -> PlannedPrompt:
    return PlannedPrompt(LENGTH, hashes(number), (cached or {}) if is_indexed else None)


class Cluster:
    """Two prefill workers and a decode worker, and a planner for them."""

    def __init__(self, clock: ManualClock, **config: object) -> None:
        self.clock = clock
        self.planner = Planner(PolicyConfig(**config), BLOCKS, clock, Random(0))  # type: ignore[arg-type]
        self.prefill = {name: worker(name) for name in ("p1", "p2")}
        self.decode = [worker("d")]

    def place(self, prompt: PlannedPrompt, **pending: int) -> Placement:
        states = [s._replace(pending_tokens=pending.get(name, 0)) for name, s in self.prefill.items()]
        placement = self.planner.place(prompt, states, self.decode)
        assert placement is not None
        return placement

    def compute(
        self, placement: Placement, seconds: float, cached: int = 0, pull: PullOutcome | None = None
    ) -> None:
        self.clock.now += seconds
        self.planner.record_prefill(placement, cached, seconds, pull or PullOutcome())


@pytest.fixture
def cluster(clock: ManualClock) -> Cluster:
    return Cluster(clock)


@pytest.fixture
def apart(clock: ManualClock) -> Cluster:
    """Return a cluster whose decode worker computes no prompts."""
    return Cluster(clock, local_prefill_tokens=0)


# --- placing ------------------------------------------------------------------------------------------------


def test_the_next_prompt_with_the_same_beginning_follows_before_the_index_knows(cluster: Cluster) -> None:
    first = cluster.place(prompt())
    assert first.prefill is not None
    assert (first.prefill_reason, first.estimate.cached_tokens) == ("tie", 0)
    again = cluster.place(prompt(), **{first.computing: LENGTH // 2})
    assert (again.computing, again.estimate.cached_tokens) == (first.computing, LENGTH - 1)
    assert again.prefill is not None
    assert again.prefill_reason == "prefix"
    cluster.clock.now += IN_FLIGHT_SECONDS + 1
    assert cluster.place(prompt()).estimate.cached_tokens == 0


def test_without_an_answer_of_the_index_the_history_stands_in(cluster: Cluster) -> None:
    first = cluster.place(prompt())
    cluster.clock.now += 1000.0
    assert cluster.place(prompt(is_indexed=False)).estimate.cached_tokens == LENGTH - 1
    cluster.planner.forget(first.computing)
    cluster.planner.forget("d")
    assert cluster.place(prompt(1)).estimate.cached_tokens == 0


def test_a_removed_worker_is_forgotten_though_its_prompt_is_computed_later(cluster: Cluster) -> None:
    placement = cluster.place(prompt())
    for worker_id in (placement.computing, "d"):
        cluster.planner.forget(worker_id)
    cluster.compute(placement, 10.0)
    planner = cluster.planner
    kept = (
        planner._history._sent,
        planner._prefill_rates._measured,
        planner._pull_rates._measured,
        planner._pull_again_at,
    )
    assert not any(kept), kept
    assert not planner._busy_until


def test_work_moves_from_a_worker_that_became_slow_and_returns_later(cluster: Cluster) -> None:
    slow = cluster.place(prompt()).computing
    for number in range(1, 9):
        placement = cluster.place(prompt(number), **{"p1" if slow == "p2" else "p2": 10**6})
        cluster.compute(placement, 10.0)
    chosen = {cluster.place(prompt(number)).computing for number in range(10, 30)}
    assert chosen == {"p1", "p2"}, "the whole cluster counts as slow while no other worker was measured"
    for number in range(30, 40):
        placement = cluster.place(prompt(number), **{slow: 10**6})
        cluster.compute(placement, 0.1)
    assert {cluster.place(prompt(number)).computing for number in range(50, 90)} == {placement.computing}
    cluster.clock.now += 20 * HALF_LIFE_SECONDS
    assert {cluster.place(prompt(number)).computing for number in range(100, 140)} == {"p1", "p2"}


def test_waiting_behind_others_is_not_held_against_the_worker(cluster: Cluster) -> None:
    first, second = cluster.place(prompt()), cluster.place(prompt())
    assert first.computing == second.computing
    cluster.clock.now += 1.0
    cluster.planner.record_prefill(first, 0, 1.0, PullOutcome())
    cluster.clock.now += 1.0
    cluster.planner.record_prefill(second, 0, 2.0, PullOutcome())
    pending = cluster.place(prompt(7), **{"p1": 1600, "p2": 1600}).estimate
    assert pending.queue_seconds == pytest.approx(1.0)


def test_a_pull_is_planned_from_the_index_and_not_from_what_is_still_computed(apart: Cluster) -> None:
    cluster = apart
    computing = cluster.place(prompt()).computing
    other = "p1" if computing == "p2" else "p2"
    busy = {computing: 3 * 10**4}
    local = cluster.place(prompt(), **busy)
    assert (local.computing, local.estimate.peer) == (other, None)
    helped = cluster.place(prompt(1, {computing: LENGTH}), **busy)
    assert helped.computing == other
    assert helped.estimate.peer is not None
    assert (helped.estimate.peer.worker_id, helped.estimate.peer.num_blocks) == (computing, 100)
    assert helped.prefill is not None
    assert helped.prefill_reason == "pull"


@pytest.mark.parametrize(("failed_bytes", "seconds"), [(0, 0.001), (1 << 20, 0.5)])
def test_for_a_while_after_a_failed_pull_no_other_begins(
    apart: Cluster, failed_bytes: int, seconds: float
) -> None:
    cluster, cached = apart, {"d": LENGTH}
    placement = cluster.place(prompt(0, cached))
    assert placement.estimate.peer is not None
    before = placement.estimate.pull_seconds
    cluster.compute(placement, 1.1, 0, PullOutcome(failed_bytes, seconds, seconds, has_failed=True))
    again = cluster.place(prompt(1, cached))
    assert again.estimate.peer is None
    cluster.clock.now += FAILED_PULL_SECONDS
    late = cluster.place(prompt(2, cached))
    assert late.estimate.peer is not None
    assert late.estimate.pull_seconds < 2 * before


def test_a_slow_pull_lowers_the_peers_estimate(apart: Cluster) -> None:
    placement = apart.place(prompt(0, {"d": LENGTH}))
    assert placement.estimate.peer is not None
    apart.compute(placement, 0.2, LENGTH - 16, PullOutcome(8 << 20, 1.0, 1.0))
    assert apart.place(prompt(1, {"d": LENGTH})).estimate.peer is None
    apart.clock.now += 20 * HALF_LIFE_SECONDS
    assert apart.place(prompt(2, {"d": LENGTH})).estimate.peer is not None, "the only peer is tried again"


@pytest.mark.parametrize("pull", [PullOutcome(100 << 20, 1.0, 0.1), PullOutcome((1 << 20) - 1, 1.0, 1.0)])
def test_a_pull_that_waited_and_a_small_one_do_not_make_a_peer_slow(
    apart: Cluster, pull: PullOutcome
) -> None:
    placement = apart.place(prompt(0, {"d": LENGTH}))
    assert placement.estimate.peer is not None
    apart.compute(placement, 1.1, LENGTH - 16, pull)
    assert apart.place(prompt(1, {"d": LENGTH})).estimate.peer is not None


def test_blocks_are_not_pulled_from_an_unhealthy_peer(cluster: Cluster) -> None:
    cluster.decode.append(worker("ill", is_unhealthy=True))
    assert cluster.place(prompt(0, {"ill": LENGTH, "gone": LENGTH})).estimate.peer is None


def test_the_decode_worker_computes_a_short_rest(cluster: Cluster) -> None:
    placement = cluster.place(prompt(0, {"d": LENGTH - 32}))
    assert (placement.prefill, placement.computing, placement.pending_tokens) == (None, "d", 32)
    cluster.decode = [worker("d", num_requests=100)]
    assert cluster.place(prompt(1, {"d": LENGTH - 32, "p1": LENGTH})).computing == "p1"


def test_the_decode_worker_copies_what_prefill_workers_hold(cluster: Cluster) -> None:
    placement = cluster.place(prompt(0, {"p1": LENGTH}), p1=10**5)
    assert placement.estimate.peer is not None
    assert (placement.computing, placement.estimate.peer.worker_id) == ("d", "p1")


def test_a_prompt_that_must_be_local_is(cluster: Cluster) -> None:
    assert cluster.place(prompt()._replace(must_be_local=True)).prefill is None


def test_without_decode_workers_there_is_no_placement(cluster: Cluster) -> None:
    cluster.decode = []
    assert cluster.planner.place(prompt(), list(cluster.prefill.values()), []) is None


# --- answers to come ----------------------------------------------------------------------------------------


def test_growing_sequences_count_as_load(clock: ManualClock) -> None:
    cluster = Cluster(clock)
    cluster.decode = [worker("small", 150), worker("large", 200, resident_tokens=1200)]
    # Of 2,400 tokens the prompt and two answers leave nothing to the smaller pool.
    grows = prompt()._replace(max_output_tokens=1000, num_answers=2)
    for _ in range(200):
        cluster.planner.record_answer(500)
    placement = cluster.place(grows)
    assert placement.resident_tokens == LENGTH + 2 * 500
    assert cluster.place(prompt()._replace(max_output_tokens=10)).resident_tokens == LENGTH + 10
    assert cluster.place(prompt()).decode.worker_id == "small"
    cluster.decode[1] = worker("large", 200, resident_tokens=300)
    assert cluster.place(grows).decode.worker_id == "large"


def test_chance_breaks_the_ties_of_prompts_of_less_than_a_block(clock: ManualClock) -> None:
    cluster = Cluster(clock, local_prefill_tokens=0)
    cluster.decode = [worker(name) for name in ("d1", "d2", "d3")]
    placements = [cluster.place(PlannedPrompt(5, [], {})) for _ in range(300)]
    for names, count in (
        (Counter(placement.decode.worker_id for placement in placements), 3),
        (Counter(placement.computing for placement in placements), 2),
    ):
        assert len(names) == count
        assert min(names.values()) > 0.7 * 300 / count


def test_a_prompt_that_would_be_late_is_not_placed(clock: ManualClock) -> None:
    planner = Planner(PolicyConfig(), BLOCKS, clock, Random(0))
    busy = worker("d", pending_tokens=50_000)
    late = prompt()._replace(max_seconds=5.0)
    with pytest.raises(TooLateError) as refused:
        planner.place(late, [], [busy])
    assert refused.value.seconds == pytest.approx((50_000 + LENGTH) / PREFILL_TOKENS_PER_SECOND)
    idle = worker("d")
    placement = planner.place(late, [], [idle])
    assert placement is not None
    assert placement.estimate.cached_tokens == 0, "what was refused does not count as sent"
