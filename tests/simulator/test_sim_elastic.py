"""Elastic roles in the simulator, with the load of the benchmark."""

from __future__ import annotations

import pytest

from quire.benchmarks.elastic_roles import PHASES, goodput, run
from quire.routing.pressure import Targets

TARGETS = Targets(1.0, 0.025)
SECONDS = 60.0
SETTLED_SECONDS = 25.0


@pytest.mark.parametrize("seed", [0, 1])
def test_elastic_roles_reach_the_best_fixed_split_of_each_phase(seed: int) -> None:
    fixed = [run(num_prefill, None, SECONDS, seed).outcomes for num_prefill in range(4)]
    elastic = run(2, TARGETS, SECONDS, seed)
    assert len(elastic.outcomes) == len(fixed[0])
    for index in range(len(PHASES)):
        begin, end = index * SECONDS, (index + 1) * SECONDS
        settled = [goodput(each, TARGETS, begin + SETTLED_SECONDS, end) for each in fixed]
        assert goodput(elastic.outcomes, TARGETS, begin + SETTLED_SECONDS, end) >= 0.99 * max(settled)
    totals = [goodput(each, TARGETS, 0.0, len(PHASES) * SECONDS) for each in fixed]
    assert goodput(elastic.outcomes, TARGETS, 0.0, len(PHASES) * SECONDS) > max(totals)


def test_roles_change_soon_after_the_load_turns_and_not_back() -> None:
    changes = run(2, TARGETS, SECONDS, 0).role_changes
    before = [role for at, _, role in changes if at < SECONDS]
    after = [(at, role) for at, _, role in changes if at >= SECONDS]
    assert set(before) == {"prefill"}
    assert {role for _, role in after} == {"decode"}
    assert after[0][0] < SECONDS + 10


def test_fixed_roles_do_not_change() -> None:
    assert run(2, None, 10.0, 0).role_changes == []
