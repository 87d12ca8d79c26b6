"""Elastic roles in the simulator beside fixed splits of four workers, under a load that turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from quire.routing.pressure import Targets
from quire.simulator.calibration import demo_calibration
from quire.simulator.cluster import ClusterConfig, Replay, RequestOutcome, replay
from quire.simulator.figures import Slo, is_good
from quire.simulator.trace import TraceRequest
from quire.simulator.workload import Workload, make_requests


class Phase(NamedTuple):
    rate: float
    input_tokens: int
    output_tokens: int


PHASES = (Phase(12.0, 1024, 16), Phase(7.0, 128, 256))
"""Long prompts with short answers, then short prompts with long answers."""
NUM_WORKERS = 4
BLOCK_TOKENS = 16
TARGETS = Targets(1.0, 0.025)
SECONDS = 60.0
SETTLED_SECONDS = 25.0


def turning_load(seconds: float, seed: int) -> list[TraceRequest]:
    """Return the requests of all phases, which follow each other; no two requests share a block."""
    requests: list[TraceRequest] = []
    for index, phase in enumerate(PHASES):
        made = make_requests(
            Workload.UNIQUE,
            int(seconds * phase.rate * 2),
            phase.rate,
            seed * len(PHASES) + index,
            input_tokens=phase.input_tokens,
            output_tokens=phase.output_tokens,
            block_tokens=BLOCK_TOKENS,
        )
        requests += [
            request._replace(
                arrival_seconds=index * seconds + request.arrival_seconds,
                block_ids=tuple((index << 40) + block_id for block_id in request.block_ids),
            )
            for request in made
            if request.arrival_seconds < seconds
        ]
    return requests


def run(num_prefill: int, targets: Targets | None, seconds: float, seed: int) -> Replay:
    """Replay the load; with targets, the roles of the workers are elastic."""
    config = ClusterConfig(
        num_prefill=num_prefill,
        num_decode=NUM_WORKERS - num_prefill,
        max_requests=100_000,
        elastic=targets,
        seed=seed,
    )
    return replay(config, demo_calibration().scaled_blocks(BLOCK_TOKENS), turning_load(seconds, seed))


def goodput(outcomes: Sequence[RequestOutcome], begin: float, end: float) -> float:
    """Return the requests per second that arrived in a period and met both targets."""
    slo = Slo(*TARGETS)
    good = [o for o in outcomes if begin <= o.request.arrival_seconds < end and is_good(o, slo)]
    return len(good) / (end - begin)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_elastic_roles_reach_the_best_fixed_split_of_each_phase(seed: int) -> None:
    fixed = [run(num_prefill, None, SECONDS, seed).outcomes for num_prefill in range(4)]
    elastic = run(2, TARGETS, SECONDS, seed)
    assert len(elastic.outcomes) == len(fixed[0])
    for index in range(len(PHASES)):
        begin, end = index * SECONDS, (index + 1) * SECONDS
        settled = [goodput(each, begin + SETTLED_SECONDS, end) for each in fixed]
        assert goodput(elastic.outcomes, begin + SETTLED_SECONDS, end) >= 0.99 * max(settled)
    totals = [goodput(each, 0.0, len(PHASES) * SECONDS) for each in fixed]
    assert goodput(elastic.outcomes, 0.0, len(PHASES) * SECONDS) > max(totals)


def test_roles_change_soon_after_the_load_turns_and_not_back() -> None:
    changes = run(2, TARGETS, SECONDS, 0).role_changes
    before = [role for at, _, role in changes if at < SECONDS]
    after = [(at, role) for at, _, role in changes if at >= SECONDS]
    assert set(before) == {"prefill"}
    assert {role for _, role in after} == {"decode"}
    assert after[0][0] < SECONDS + 10


def test_fixed_roles_do_not_change() -> None:
    assert run(2, None, 10.0, 0).role_changes == []
