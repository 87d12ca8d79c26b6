"""Workers that share a machine's processors slow each other down, and workers with their own do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.routing.placement import PolicyConfig
from quire.simulator.calibrate import overhead_of, shares_of
from quire.simulator.calibration import Calibration, CalibrationError
from quire.simulator.cluster import ClusterConfig, Replay, replay
from quire.simulator.trace import TraceRequest

FREE = {"overhead_seconds": 0.0, "handoff_seconds": 0.0, "pull_bytes_per_second": None}


def prompt(at: float, num_tokens: int, first_block: int, num_output: int = 1) -> TraceRequest:
    blocks = tuple(range(first_block, first_block - (-num_tokens // 16)))
    return TraceRequest(at, num_tokens, num_output, blocks)


def run(costs: Calibration, *requests: TraceRequest, is_one_machine: bool = True) -> Replay:
    placing = PolicyConfig(local_prefill_tokens=0)
    config = ClusterConfig(num_prefill=2, num_decode=1, is_one_machine=is_one_machine, placing=placing)
    return replay(config, costs, requests)


@pytest.fixture
def costs(calibration: Calibration) -> Calibration:
    """A prompt uses all processors, a decode worker half of them; nothing else takes time."""
    return replace(calibration, prefill_share=1.0, decode_share=0.5, **FREE)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "seconds"), [(1.0, 0.4), (0.75, 0.3), (0.5, 0.2), (0.2, 0.2)])
def test_prompts_slow_each_other_only_if_processors_are_short(
    costs: Calibration, share: float, seconds: float
) -> None:
    replayed = run(replace(costs, prefill_share=share), prompt(0.0, 200, 0), prompt(0.0, 200, 100))
    assert [outcome.ttft_seconds for outcome in replayed.outcomes] == pytest.approx([seconds] * 2)


def test_only_the_time_together_is_shared(costs: Calibration) -> None:
    first, second = run(costs, prompt(0.0, 200, 0), prompt(0.1, 400, 100)).outcomes
    # The first has 0.1 s of its work left, for which both take 0.2 s; 0.3 s of the second's are left then.
    assert first.ttft_seconds == pytest.approx(0.3)
    assert second.ttft_seconds == pytest.approx(0.2 + 0.3)


def test_answers_are_slower_beside_a_prompt_and_the_prompt_beside_answers(costs: Calibration) -> None:
    answer, beside = prompt(0.0, 16, 0, 101), prompt(0.5, 200, 100)
    outcomes = {each.request: each for each in run(costs, answer, beside).outcomes}
    # Both want 1.5 times the processors: the prompt of 0.2 s takes 0.3 s, in which 0.2 s of steps are made.
    assert outcomes[beside].ttft_seconds == pytest.approx(0.3)
    assert outcomes[answer].tpot_seconds == pytest.approx(0.01 + 0.1 / 100)


def test_a_replay_ends_with_its_last_answer(costs: Calibration) -> None:
    replayed = run(costs, prompt(0.0, 16, 0, 401), prompt(0.5, 200, 100, 1), prompt(0.7, 200, 300, 9))
    ends = [
        each.request.arrival_seconds
        + each.ttft_seconds
        + each.tpot_seconds * (each.request.output_tokens - 1)
        for each in replayed.outcomes
    ]
    assert replayed.seconds == pytest.approx(max(ends))


def test_workers_with_their_own_processors_are_as_fast_as_alone(costs: Calibration) -> None:
    requests = (prompt(0.0, 200, 0), prompt(0.0, 200, 100), prompt(0.0, 16, 200, 101))
    unshared = replace(costs, prefill_share=0.0, decode_share=0.0)
    apart = run(costs, *requests, is_one_machine=False)
    assert apart == run(unshared, *requests, is_one_machine=False)
    with pytest.raises(CalibrationError, match="no shares of the processors"):
        run(unshared, *requests)
    assert apart.seconds < run(costs, *requests).seconds


def test_the_routers_work_takes_longer_on_a_busy_machine(costs: Calibration) -> None:
    slow = replace(costs, overhead_seconds=0.01, decode_share=1.0)
    answer, first, second = prompt(0.0, 16, 0, 101), prompt(0.5, 900, 100), prompt(0.6, 100, 200)
    outcomes = {each.request: each for each in run(slow, answer, first, second).outcomes}
    # Two workers are busy when the second prompt arrives, and three when it is computed.
    assert outcomes[second].ttft_seconds == pytest.approx(0.01 * 2 + 0.1 * 3)


@pytest.mark.parametrize(
    ("together", "beside", "shares"),
    [(2.0, 2.0, (1.0, 0.5)), (1.5, 1.75, (0.75, 0.5)), (2.3, 0.9, (1.0, 0.0)), (2.0, 9.0, (1.0, 1.0))],
)
def test_shares_follow_from_how_much_work_is_slowed(
    together: float, beside: float, shares: tuple[float, float]
) -> None:
    assert shares_of(together, 2, beside, 2) == pytest.approx(shares)


def test_long_prompts_make_the_steps_of_their_answers_longer(costs: Calibration) -> None:
    contexts = replace(costs, context_seconds=1e-5)
    requests = (prompt(0.0, 64, 0, 101), prompt(10.0, 1064, 100, 101), prompt(20.0, 64, 200, 101))
    outcomes = run(contexts, *requests).outcomes
    assert [outcome.tpot_seconds for outcome in outcomes] == pytest.approx([0.01, 0.02, 0.01])


def test_the_work_for_one_request_slows_the_prompts_of_others(costs: Calibration) -> None:
    requests = (prompt(0.0, 200, 0), prompt(0.2, 200, 100))
    shared = replace(costs, overhead_seconds=0.1, request_share=1.0)
    outcomes = run(shared, *requests).outcomes
    # 0.1 s of the first prompt is left when the second request arrives; both then take twice as long.
    assert [outcome.ttft_seconds for outcome in outcomes] == pytest.approx([0.4, 0.4])
    alone = run(shared, *requests, is_one_machine=False).outcomes
    assert [outcome.ttft_seconds for outcome in alone] == pytest.approx([0.3, 0.3])


def test_the_overhead_of_a_prompt_is_that_of_short_ones_that_are_handed_over() -> None:
    points = [(64.0, 0.012), (128.0, 0.02), (256.0, 0.03), (512.0, 0.05), (1024.0, 0.2)]
    assert overhead_of(points) == pytest.approx(0.01)
    assert overhead_of([(64.0, 0.001), *points[1:]]) == pytest.approx(0.95 * 0.001)
    assert overhead_of(points[1:3]) == pytest.approx(0.01)
