"""The phases of a request: where each is measured, and that a span has the same times."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from quire.services.server.phases import (
    HAND_OVER,
    PROMPT_PHASES,
    ROUTER_PHASES,
    Phase,
    PhaseMetrics,
    RequestPhases,
)
from quire.services.server.tracing import Metadata


class Span:
    """Keeps the parts that it is told of."""

    metadata: Metadata | None = None

    def __init__(self) -> None:
        self.parts: list[tuple[str, float, float]] = []

    def part(self, name: str, start: float, end: float) -> None:
        self.parts.append((name, start, end))

    def set(self, **attributes: str | int | float) -> None:
        pass


def test_each_phase_takes_place_in_one_kind_of_process_and_is_described() -> None:
    assert sorted((*ROUTER_PHASES, *PROMPT_PHASES, *HAND_OVER)) == sorted(Phase)
    assert all(phase.text.endswith(".") for phase in Phase)
    assert {phase.value: phase for phase in Phase}["pull"] is Phase.PULL


def test_a_phase_is_measured_and_traced_with_the_same_times() -> None:
    registry, span = CollectorRegistry(), Span()
    phases = RequestPhases(PhaseMetrics(registry, PROMPT_PHASES), span)
    phases.record(Phase.PULL, 10.0, 12.5)
    assert span.parts == [("pull", 10.0, 12.5)]
    value = {
        phase: registry.get_sample_value("quire_request_phase_seconds_sum", {"phase": phase})
        for phase in Phase
    }
    assert {phase for phase, seconds in value.items() if seconds is not None} == set(PROMPT_PHASES)
    assert value[Phase.PULL] == 2.5


def test_without_metrics_a_phase_is_only_traced() -> None:
    span = Span()
    RequestPhases(None, span).record(Phase.PULL, 10.0, 12.5)
    assert span.parts == [("pull", 10.0, 12.5)]


def test_a_phase_of_another_process_is_a_defect() -> None:
    metrics = PhaseMetrics(CollectorRegistry(), ROUTER_PHASES)
    with pytest.raises(KeyError):
        metrics.observe(Phase.PULL, 1.0)
