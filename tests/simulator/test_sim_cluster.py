"""Replays that can be counted out, and what must come out of any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.routing.placement import PolicyConfig
from quire.routing.policy import Policy
from quire.routing.pulls import Pulls
from quire.simulator.calibration import Calibration
from quire.simulator.capacity import NotWithinReach, smallest_cluster
from quire.simulator.cluster import ClusterConfig, Replay, replay
from quire.simulator.figures import Slo, figures, quantile
from quire.simulator.trace import TraceRequest
from quire.simulator.workload import Workload, make_requests

LOOSE = Slo(1e9, 1e9)


def request(at: float, num_tokens: int, first_block: int, num_output: int = 11) -> TraceRequest:
    blocks = tuple(range(first_block, first_block - (-num_tokens // 16)))
    return TraceRequest(at, num_tokens, num_output, blocks)


def run(
    calibration: Calibration, *requests: TraceRequest, shape: tuple[int, int] = (1, 1), **placing: object
) -> Replay:
    config = PolicyConfig(**{"local_prefill_tokens": 0, **placing})  # type: ignore[arg-type]
    cluster = ClusterConfig(num_prefill=shape[0], num_decode=shape[1], placing=config)
    return replay(cluster, calibration, requests)


def test_one_request_takes_the_sum_of_its_parts(calibration: Calibration) -> None:
    replayed = run(calibration, request(1.0, 200, 0))
    [outcome] = replayed.outcomes
    assert outcome.ttft_seconds == pytest.approx(0.005 + 0.2)
    assert outcome.tpot_seconds == pytest.approx((0.002 + 10 * 0.01) / 10)
    assert replayed.seconds == pytest.approx(0.205 + 0.002 + 0.1)
    assert (outcome.cached_tokens, outcome.is_local) == (0, False)


def test_prompts_wait_for_each_other_and_reuse_earlier_blocks(calibration: Calibration) -> None:
    first, second, third = run(
        calibration, request(0.0, 200, 0), request(0.0, 200, 100), request(0.0, 200, 0)
    ).outcomes
    assert first.ttft_seconds == pytest.approx(0.205)
    assert second.ttft_seconds == pytest.approx(0.405)
    # 12 of its blocks are full.
    assert third.cached_tokens == 192
    assert third.ttft_seconds == pytest.approx(0.405 + 0.008)


def test_sequences_that_decode_together_slow_each_other_down(calibration: Calibration) -> None:
    [first, second] = run(
        calibration, request(0.0, 16, 0, 101), request(0.0, 16, 100, 101), shape=(2, 1)
    ).outcomes
    assert first.tpot_seconds == pytest.approx(0.011 + 0.002 / 100, rel=0.01)
    assert second.tpot_seconds == pytest.approx(first.tpot_seconds, rel=0.1)


def test_a_full_batch_lets_others_wait(calibration: Calibration) -> None:
    outcomes = run(calibration, *(request(0.0, 16, 100 * n, 101) for n in range(5)), shape=(5, 1)).outcomes
    assert [round(outcome.tpot_seconds, 4) for outcome in outcomes[:4]] == pytest.approx(
        [0.013] * 4, abs=1e-3
    )
    assert outcomes[4].tpot_seconds > 0.022


def test_a_full_pool_lets_others_wait(calibration: Calibration) -> None:
    small = replace(calibration, num_blocks=20)
    outcomes = run(small, request(0.0, 200, 0, 101), request(0.0, 200, 100, 101), shape=(2, 1)).outcomes
    assert outcomes[0].tpot_seconds == pytest.approx(0.01, rel=0.01)
    assert outcomes[1].tpot_seconds == pytest.approx(0.02, rel=0.05)


def test_blocks_are_copied_where_that_is_sooner(calibration: Calibration) -> None:
    requests = [request(0.0, 960, 0), *(request(5.0, 960, 0) for _ in range(4))]
    replayed = run(calibration, *requests, shape=(4, 1), policy=Policy.LOAD)
    pulled = [outcome for outcome in replayed.outcomes if outcome.pulled_bytes]
    assert pulled
    # 60 blocks take 61 ms, the last token 1 ms; the longest waits for others' last tokens.
    assert all(0.067 <= outcome.ttft_seconds < 0.075 for outcome in pulled)
    assert figures(replayed, LOOSE).pulled_bytes == 60e6 * len(pulled)


def test_an_unmeasured_network_moves_nothing(calibration: Calibration) -> None:
    unmeasured = replace(calibration, pull_bytes_per_second=None)
    requests = [request(0.0, 960, 0), *(request(5.0, 960, 0) for _ in range(4))]
    replayed = run(unmeasured, *requests, shape=(4, 1), policy=Policy.LOAD)
    assert figures(replayed, LOOSE).pulled_bytes == 0


def test_a_short_rest_is_computed_where_it_is_decoded(calibration: Calibration) -> None:
    replayed = run(calibration, request(0.0, 960, 0), request(5.0, 976, 0), local_prefill_tokens=64)
    assert [outcome.is_local for outcome in replayed.outcomes] == [False, True]
    assert replayed.outcomes[1].cached_tokens == 960


def test_evicted_blocks_are_computed_again(calibration: Calibration) -> None:
    small = replace(calibration, num_blocks=70)
    outcomes = run(small, request(0.0, 960, 0), request(5.0, 960, 100), request(10.0, 960, 0)).outcomes
    assert [outcome.cached_tokens for outcome in outcomes] == [0, 0, 160]


def test_more_requests_than_the_router_allows_are_refused(calibration: Calibration) -> None:
    config = ClusterConfig(num_prefill=1, num_decode=1, max_requests=2)
    replayed = replay(config, calibration, [request(0.0, 100, n * 100) for n in range(5)])
    assert (replayed.num_rejected, len(replayed.outcomes)) == (3, 2)
    assert figures(replayed, LOOSE).slo_share == 0.4


@pytest.mark.parametrize("workload", Workload)
@pytest.mark.parametrize("policy", Policy)
def test_every_request_is_answered_once_and_the_same_each_time(
    workload: Workload, policy: Policy, calibration: Calibration
) -> None:
    block_tokens = 512 if workload is Workload.MOONCAKE else 16
    requests = make_requests(workload, 120, 20.0, seed=3, block_tokens=block_tokens)
    config = ClusterConfig(num_prefill=3, num_decode=2, placing=PolicyConfig(policy=policy), seed=5)
    costs = calibration.scaled_blocks(block_tokens)
    replayed = replay(config, costs, requests)
    assert sorted(outcome.request for outcome in replayed.outcomes) == sorted(requests)
    assert all(outcome.ttft_seconds > 0.005 for outcome in replayed.outcomes)
    assert all(0 <= outcome.cached_tokens < outcome.request.input_tokens for outcome in replayed.outcomes)
    assert 0 < replayed.prefill_busy_share <= 1
    assert 0 < replayed.decode_busy_share <= 1
    assert replay(config, costs, requests) == replayed


def test_a_policy_that_knows_prefixes_beats_load(calibration: Calibration) -> None:
    requests = make_requests(Workload.SHARED, 300, 4.0, seed=3, block_tokens=16)
    shares = {}
    for policy in Policy:
        placing = PolicyConfig(policy=policy, pulls=Pulls.NEVER)
        config = ClusterConfig(num_prefill=4, num_decode=4, placing=placing)
        shares[policy] = figures(replay(config, calibration, requests), LOOSE).cached_share
    assert shares[Policy.PRECISE] > shares[Policy.LOAD]


@pytest.mark.slow
def test_the_smallest_cluster_is_found(calibration: Calibration) -> None:
    # 8 prompts a second of a second each.
    requests = make_requests(Workload.UNIQUE, 160, 8.0, seed=0, input_tokens=1000, block_tokens=16)
    config = ClusterConfig(num_prefill=1, num_decode=1)
    slo = Slo(3.0, 0.05)
    trial = smallest_cluster(config, calibration, requests, slo, 32)
    assert trial.figures.slo_share >= 0.9
    assert trial.num_prefill >= 8
    total = trial.num_prefill + trial.num_decode
    with pytest.raises(NotWithinReach):
        smallest_cluster(config, calibration, requests, slo, total - 1)
    with pytest.raises(NotWithinReach, match=r"4 workers do not suffice: at best [\d.]+%"):
        smallest_cluster(config, calibration, requests, Slo(3.0, 0.05), 4)


def test_a_cluster_needs_a_decode_worker() -> None:
    with pytest.raises(ValueError, match="one decode worker"):
        ClusterConfig(num_prefill=1, num_decode=0)


def test_quantiles() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1, 1, 2, 3, 4]
    assert quantile([], 0.5) == 0.0
