"""Elastic roles: what each split is expected to cost, and when workers change."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.routing.demand import Demand, RoleState, StepTimes, Totals
from quire.routing.elastic_roles import MARGIN, MIN_PRESSURE, PAUSE_SECONDS, REVERSAL_SECONDS, ElasticRoles
from quire.routing.pressure import Targets, congestion, predict

TARGETS = Targets(1.0, 0.025)
CAPACITY_TOKENS = 100_000
BOUND_SECONDS = 20.0
"""Time within which a cluster must begin to follow a load that turns."""


@dataclass
class Load:
    """Requests that come evenly, and what they cost."""

    rate: float
    prompt_seconds: float
    answer_tokens: float
    step_base: float = 0.008
    step_slope: float = 0.001

    def demand(self, backlog_seconds: float = 0.0) -> Demand:
        tokens_per_second = self.rate * self.answer_tokens
        return Demand(
            self.prompt_seconds,
            self.rate * self.prompt_seconds,
            0.0,
            backlog_seconds,
            tokens_per_second,
            self.answer_tokens,
            self.step_base,
            self.step_slope,
            0,
            CAPACITY_TOKENS,
        )

    def worst(self, num_prefill: int, num_workers: int) -> float:
        return predict(self.demand(), TARGETS, num_prefill, num_workers - num_prefill).worst


PROMPTS = Load(rate=12, prompt_seconds=0.164, answer_tokens=15)
ANSWERS = Load(rate=7, prompt_seconds=0.039, answer_tokens=255)


@dataclass
class Plant:
    """Workers under a load, in steps of a second: follows the controller, and remembers each change."""

    num_prefill: int
    num_workers: int
    load: Load
    noise: Random | None = None
    now: float = 0.0
    backlog_seconds: float = 0.0
    totals: Totals = field(default_factory=Totals)
    changes: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roles = {
            f"w{index}": "prefill" if index < self.num_prefill else "decode"
            for index in range(self.num_workers)
        }
        self.controller = ElasticRoles(TARGETS, lambda: self.now)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self._second()

    def _second(self) -> None:
        self.now += 1.0
        load, num_prefill = self.load, list(self.roles.values()).count("prefill")
        num_decode = self.num_workers - num_prefill
        factor = 1.0 if self.noise is None else self.noise.uniform(0.9, 1.1)
        work = factor * load.rate * load.prompt_seconds
        self.backlog_seconds = max(0.0, self.backlog_seconds + work - (num_prefill or num_decode))
        lost = 0.0 if num_prefill else min(0.9, work / num_decode)
        tokens = factor * load.rate * load.answer_tokens
        tpot = load.step_base * (1 + congestion(lost + load.step_slope * tokens / num_decode))
        old = self.totals
        self.totals = Totals(
            old.num_prompts + round(factor * load.rate),
            old.remote_seconds + (work if num_prefill else 0.0),
            old.local_seconds + (0.0 if num_prefill else work),
            old.num_tokens + tokens,
            old.token_seconds + tokens * tpot,
        )
        resident = round(tokens * tpot * load.answer_tokens)
        servers = num_prefill or num_decode
        states = [
            RoleState(
                name,
                role,
                self.backlog_seconds / servers if role == "prefill" or not num_prefill else 0.0,
                resident // num_decode if role == "decode" else 0,
                CAPACITY_TOKENS,
            )
            for name, role in self.roles.items()
        ]
        for change in self.controller.decide(states, self.totals):
            assert self.roles[change.worker_id] != change.role
            self.roles[change.worker_id] = change.role
            self.changes.append((self.now, change.role))
        assert "decode" in self.roles.values()

    @property
    def num_reversals(self) -> int:
        return sum(a[1] != b[1] for a, b in pairwise(self.changes))

    @property
    def worst(self) -> float:
        return self.load.worst(list(self.roles.values()).count("prefill"), self.num_workers)


loads = st.builds(
    Load,
    rate=st.floats(0.5, 50),
    prompt_seconds=st.floats(0.005, 1.0),
    answer_tokens=st.floats(2, 500),
    step_base=st.floats(0.001, 0.02),
    step_slope=st.floats(0.00005, 0.002),
)


def test_a_split_costs_what_its_queues_cost() -> None:
    by_prefill = [predict(PROMPTS.demand(), TARGETS, count, 4 - count) for count in range(4)]
    # 1.97 s of prompts in a second need three workers, if prompts should not stall the answers.
    assert min(range(4), key=lambda count: by_prefill[count].worst) == 3
    assert by_prefill[1].ttft > 10
    assert by_prefill[0].tpot > 1 > by_prefill[3].tpot
    assert min(range(4), key=lambda count: predict(ANSWERS.demand(), TARGETS, count, 4 - count).worst) == 0


@given(loads, st.integers(2, 12))
def test_more_workers_of_a_role_never_slow_its_part(load: Load, num_workers: int) -> None:
    splits = [predict(load.demand(), TARGETS, count, num_workers - count) for count in range(1, num_workers)]
    for fewer, more in pairwise(splits):
        assert more.ttft <= fewer.ttft
        assert more.tpot >= fewer.tpot


def test_the_step_time_is_learned() -> None:
    times = StepTimes()
    for sequences in range(1, 40):
        times.add(sequences, 0.008 + 0.001 * sequences, 1.0)
    base, slope = times.line()
    assert base == pytest.approx(0.008, rel=0.05)
    assert slope == pytest.approx(0.001, rel=0.05)


def test_one_measurement_gives_a_cautious_step_time() -> None:
    times = StepTimes()
    assert times.line() == (0.0, 0.0)
    times.add(16.0, 0.02, 1.0)
    base, slope = times.line()
    assert base + 16 * slope == pytest.approx(0.02)
    assert 0.0 < base < 0.02


@pytest.mark.parametrize("load", [PROMPTS, ANSWERS])
@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_workers_get_the_role_that_lacks(load: Load, begin: int) -> None:
    plant = Plant(begin, 4, load)
    plant.run(300)
    best = min(load.worst(count, 4) for count in range(4))
    assert plant.worst < max(MIN_PRESSURE, best / (1 - MARGIN))
    assert plant.num_reversals == 0


@pytest.mark.parametrize(
    ("before", "after", "role"), [(PROMPTS, ANSWERS, "decode"), (ANSWERS, PROMPTS, "prefill")]
)
def test_a_load_that_turns_is_followed_soon(before: Load, after: Load, role: str) -> None:
    plant = Plant(2, 4, before)
    plant.run(120)
    plant.load = after
    first = len(plant.changes)
    plant.run(int(BOUND_SECONDS))
    assert plant.changes[first][1] == role
    plant.run(40)
    assert plant.worst < 1.0


def test_nothing_changes_without_requests_or_while_targets_are_met() -> None:
    for load in (Load(0.0, 0.1, 10), Load(1.0, 0.05, 20)):
        plant = Plant(2, 4, load)
        plant.run(300)
        assert plant.changes == []


@settings(deadline=None, max_examples=40)
@given(loads, st.integers(2, 8), st.data())
def test_a_constant_load_that_can_be_served_is_served_without_flapping(
    load: Load, num_workers: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, num_workers - 1))
    noise = Random(data.draw(st.integers(0, 1000)))
    best = min(load.worst(count, num_workers) for count in range(num_workers))
    plant = Plant(begin, num_workers, load, noise)
    plant.run(600)
    if best < 0.5:
        assert plant.worst < 1.0
        assert plant.num_reversals <= 1
    # Even a load that no split can serve lets the roles change ever more rarely.
    assert plant.num_reversals <= 5


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_load_keeps_a_decode_worker_and_the_pause_between_changes(data: st.DataObject) -> None:
    now = 0.0
    controller = ElasticRoles(TARGETS, lambda: now)
    roles = {f"w{index}": data.draw(st.sampled_from(["prefill", "decode"])) for index in range(4)}
    totals, changed = Totals(), list[tuple[float, str]]()
    amounts = st.tuples(st.integers(0, 50), *[st.floats(0, 20)] * 2, st.floats(0, 5000), st.floats(0, 500))
    for _ in range(40):
        now += data.draw(st.floats(0.0, 15.0))
        new = data.draw(amounts)
        totals = Totals(*(a + b for a, b in zip(totals, new, strict=True)))
        states = [
            RoleState(name, role, data.draw(st.floats(0, 30)), data.draw(st.integers(0, 200)), 100)
            for name, role in roles.items()
        ]
        had_decode = "decode" in roles.values()
        changes = controller.decide(states, totals)
        for change in changes:
            assert roles[change.worker_id] != change.role
            roles[change.worker_id] = change.role
        assert "decode" in roles.values() or not had_decode
        if not changes:
            continue
        if changed and had_decode:
            then, role = changed[-1]
            least = PAUSE_SECONDS if role == changes[0].role else REVERSAL_SECONDS
            assert now - then >= least
        changed.append((now, changes[0].role))


def test_the_last_decode_worker_that_is_lost_is_replaced() -> None:
    now = 0.0
    controller = ElasticRoles(TARGETS, lambda: now)
    states = [RoleState(name, "prefill", 0.0, 0, CAPACITY_TOKENS) for name in ("p1", "p0")]
    assert controller.decide(states, Totals()) == []
    now = 2.0
    (change,) = controller.decide(states, Totals())
    assert (change.worker_id, change.role, change.cause) == ("p0", "decode", "none_left")
    assert controller.decide([], Totals()) == []


def test_a_refused_change_is_not_asked_for_again_at_once() -> None:
    now = 0.0
    controller = ElasticRoles(TARGETS, lambda: now)
    states = [RoleState("p0", "prefill"), RoleState("p1", "prefill")]
    asked = []
    for _ in range(12):
        now += 1.0
        asked += [now for _ in controller.decide(states, Totals())]
    assert asked == [3.0, 6.0, 9.0, 12.0]


def test_a_change_by_someone_else_counts() -> None:
    plant = Plant(2, 4, PROMPTS)
    plant.run(1)
    plant.roles["w0"] = "decode"
    plant.run(60)
    assert min(time for time, role in plant.changes if role == "prefill") >= 1.0 + REVERSAL_SECONDS
