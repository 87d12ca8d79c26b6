"""The health of workers, compared with a model that derives every fact from the history of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from quire.protos import worker_pb2
from quire.services.router.config import SILENT_SECONDS
from quire.services.router.workers.health import PENALTY_SECONDS, WorkerHealth
from quire.services.router.workers.membership import StaticMembership
from quire.services.router.workers.pulse import (
    HALF_LIFE_SECONDS,
    LATE_SECONDS,
    LEAST_LIMIT_SECONDS,
    LIMIT_FACTOR,
)
from quire.services.router.workers.silences import TICK_SECONDS, vanished
from quire.services.router.workers.worker import Worker, has_substitute
from quire.services.router.workers.worker_set import WorkerSet

ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


class Model:
    """One worker: all events that it has had, and what follows from them."""

    def __init__(self, role: str, is_draining: bool) -> None:
        self.role = role
        self.events: list[tuple[str, Any]] = [("draining", is_draining)]
        self.measured = self.silence = 0.0
        self.past_silences: list[tuple[float, float]] = []
        """When each silence ended, in seconds that were measured, and its length."""

    def add(self, name: str, value: Any = None) -> None:
        self.events.append((name, value))

    def last(self, *names: str) -> tuple[str, Any]:
        """Return the last of some events."""
        return next((event for event in reversed(self.events) if event[0] in names), ("never", None))

    def pass_silently(self, seconds: float) -> None:
        if not self.is_set_aside:
            self.silence += seconds
            self.measured += seconds

    def end_silence(self) -> None:
        if not self.has_vanished:
            self.past_silences.append((self.measured, self.silence))
        self.silence = 0.0

    @property
    def has_vanished(self) -> bool:
        weights = [
            length * 0.5 ** ((self.measured - ended) / HALF_LIFE_SECONDS)
            for ended, length in self.past_silences
        ]
        return self.silence >= max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * max(weights, default=0.0))

    @property
    def is_draining(self) -> bool:
        return bool(self.last("draining")[1])

    @property
    def is_stalled(self) -> bool:
        return bool(self.last("stalled")[1])

    @property
    def is_set_aside(self) -> bool:
        return self.last("failed", "returned")[0] == "failed"

    @property
    def may_be_stranger(self) -> bool:
        return self.last("proof_missing", "proved", "reconnected")[0] == "proof_missing"

    @property
    def missed(self) -> list[float]:
        """Return the times of the probes that were missed since the last answer."""
        names = [name for name, _ in self.events]
        answered = max((at for at, name in enumerate(names) if name == "answered"), default=-1)
        return [value for name, value in self.events[answered + 1 :] if name == "probe_missed"]

    @property
    def answered_at(self) -> float:
        return max((value for name, value in self.events if name == "answered"), default=0.0)

    @property
    def presence(self) -> str:
        return next((name for name, _ in self.events if name in ("left", "lost")), "joined")

    @property
    def has_symptom(self) -> bool:
        is_unleased = self.last("lease_ended", "lease_checked")[0] == "lease_ended"
        is_silent = bool(self.missed) or self.silence >= LATE_SECONDS
        return is_silent or is_unleased or self.is_set_aside or self.is_stalled

    def is_unhealthy(self, now: float) -> bool:
        failed_at = self.last("failed")[1]
        return self.has_symptom or (failed_at is not None and now < failed_at + PENALTY_SECONDS)

    @property
    def can_serve(self) -> bool:
        hindrances = (self.is_draining, self.is_set_aside, self.is_stalled, self.presence != "joined")
        return not any(hindrances)

    def can_replace(self, other: Model) -> bool:
        is_able = self.presence == "joined" and not self.is_draining and not self.has_symptom
        return self is not other and is_able and self.role in (other.role, "decode")


names = st.sampled_from(sorted(ROLES))


class HealthMachine(RuleBasedStateMachine):
    """Two prefill and two decode workers, to which anything happens in any order."""

    now = 100.0

    @initialize(draining=st.sets(names, max_size=1))
    def join(self, draining: set[str]) -> None:
        self.workers = WorkerSet(StaticMembership([]), clock=self.clock)
        self.models = {name: Model(role, name in draining) for name, role in ROLES.items()}
        self.known = {name: self.make_worker(name, role) for name, role in ROLES.items()}
        self.workers._workers = {worker.address: worker for worker in self.known.values()}

    def clock(self) -> float:
        return self.now

    def make_worker(self, name: str, role: str) -> Worker:
        health = WorkerHealth(self.clock, is_draining=self.models[name].is_draining)
        info = worker_pb2.GetWorkerInfoResponse(worker_id=name, role=role, epoch="1")
        return Worker(f"{name}:1", info, Mock(outputs=Mock(is_open=True)), health)

    def happen(self, name: str, event: str, value: Any = None) -> Any:
        """Let one event happen to a worker and to its model; return what the worker's health returns."""
        self.models[name].add(event, value)
        method: Callable[..., Any] = getattr(self.known[name].health, event)
        return method()

    # --- events -------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.05, 1.0, PENALTY_SECONDS, 5.0, SILENT_SECONDS]))
    def time_passes_that_nobody_measures(self, seconds: float) -> None:
        self.now += seconds

    @rule(num_ticks=st.integers(1, 40), punctual=st.sets(names))
    def some_are_silent(self, num_ticks: int, punctual: set[str]) -> None:
        """Measure silences as ``Silences`` does, and set aside those that have vanished."""
        could_serve = self.roles_served()
        for _ in range(num_ticks):
            self.now += TICK_SECONDS
            for name in punctual:
                self.hear(name)
            for name, model in self.models.items():
                self.known[name].health.passed(TICK_SECONDS)
                model.pass_silently(TICK_SECONDS)
            models = self.models
            expected = [
                name
                for name, model in models.items()
                if model.presence == "joined"
                and model.has_vanished
                and not model.is_set_aside
                and any(other.can_replace(model) for other in models.values())
            ]
            gone = vanished(self.workers.all())
            assert [worker.worker_id for worker in gone] == expected
            for name in expected:
                self.happen(name, "failed", self.now)
        assert self.roles_served() == could_serve, "silence has taken the last worker of a role"

    def roles_served(self) -> list[str]:
        """Return the roles whose requests can be served; decode workers can compute prompts too."""
        return [
            role
            for role in ("prefill", "decode")
            if self.workers.serving(role) or self.workers.serving("decode")
        ]

    @rule(name=names)
    def hear(self, name: str) -> None:
        if not self.models[name].is_set_aside:
            self.models[name].end_silence()
        self.known[name].health.heard()

    @rule(name=names)
    def fail(self, name: str) -> None:
        was_set_aside = self.models[name].is_set_aside
        assert self.happen(name, "failed", self.now) != was_set_aside

    @rule(name=names, late=st.floats(0, 3), is_itself=st.booleans())
    def answer(self, name: str, late: float, is_itself: bool) -> None:
        """Answer a probe.

        One from before the failure, or by another process at the address, does not bring the worker back.
        """
        health, model, begin = self.known[name].health, self.models[name], self.now - late
        health.answered(begin)
        model.add("answered", begin)
        if is_itself:
            returns = model.is_set_aside and begin >= model.last("failed")[1]
            if returns:
                model.end_silence()
                model.add("returned")
            assert health.returned(begin) == returns

    @rule(name=names, late=st.floats(0, 2 * SILENT_SECONDS))
    def miss_a_probe(self, name: str, late: float) -> None:
        """Miss a probe that began some time ago: this process itself may have been late."""
        health, model = self.known[name].health, self.models[name]
        health.probe_missed(self.now - late)
        model.add("probe_missed", self.now - late)
        is_silent = len(model.missed) > 1 and self.now - model.missed[0] >= SILENT_SECONDS
        assert health.has_missed_probes(SILENT_SECONDS) == is_silent
        if is_silent:
            self.end(name, "lost")

    @rule(name=names, is_stalled=st.booleans())
    def report_a_stall(self, name: str, is_stalled: bool) -> None:
        is_change = is_stalled != self.models[name].is_stalled
        self.models[name].add("stalled", is_stalled)
        assert self.known[name].health.reported_stalled(is_stalled) == is_change

    @rule(name=names, is_draining=st.booleans())
    def report_a_drain(self, name: str, is_draining: bool) -> None:
        is_change = is_draining != self.models[name].is_draining
        self.models[name].add("draining", is_draining)
        assert self.known[name].health.reported_draining(is_draining) == is_change

    @rule(name=names, event=st.sampled_from(["lease_ended", "lease_checked"]))
    def lease(self, name: str, event: str) -> None:
        self.happen(name, event)

    @rule(name=names, event=st.sampled_from(["proof_missing", "proved", "reconnected"]))
    def proof(self, name: str, event: str) -> None:
        self.happen(name, event)

    @rule(name=names, event=st.sampled_from(["left", "lost"]))
    def end(self, name: str, event: str) -> None:
        self.happen(name, event)
        self.workers._workers.pop(f"{name}:1", None)

    # --- what always holds --------------------------------------------------------------------------------

    @invariant()
    def is_as_in_the_model(self) -> None:
        for name, model in self.models.items():
            health = self.known[name].health
            found = (health.is_draining, health.is_stalled, health.is_set_aside, health.may_be_stranger)
            assert found == (model.is_draining, model.is_stalled, model.is_set_aside, model.may_be_stranger)
            assert health.has_symptom == model.has_symptom
            assert health.is_unhealthy == model.is_unhealthy(self.now)
            assert health.has_vanished == model.has_vanished
            assert health.answered_at == model.answered_at
            assert (health.is_gone, health.is_lost) == (model.presence != "joined", model.presence == "lost")
            assert health.can_serve == model.can_serve
            is_replaceable = any(other.can_replace(model) for other in self.models.values())
            assert has_substitute(self.known[name], self.workers.all()) == is_replaceable

    @invariant()
    def new_requests_go_to_workers_that_may_get_them(self) -> None:
        serving = {
            worker.worker_id for role in ("prefill", "decode") for worker in self.workers.serving(role)
        }
        for name, model in self.models.items():
            is_excluded = model.is_draining or model.is_stalled or model.is_set_aside
            assert (name in serving) == (model.presence == "joined" and not is_excluded)


TestHealth = HealthMachine.TestCase


def test_only_its_events_change_the_health_of_a_worker() -> None:
    health: Any = WorkerHealth()
    assert all(name.startswith("_") for name in vars(health))
    for name in ("can_serve", "is_draining", "is_lost", "answered_at"):
        with pytest.raises(AttributeError):
            setattr(health, name, True)
