"""Which processors the workers of one machine use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.services.local.local_launcher import (
    Place,
    lending_is_possible,
    places_of,
    share_of_processors,
)
from quire.services.worker.config import WorkerConfig


def test_processors_are_divided_evenly() -> None:
    taken: list[tuple[int, ...]] = []
    for _ in range(3):
        taken.append(share_of_processors([0, 2, 3, 5], taken, 3))
    assert taken == [(0, 2), (3,), (5,)]
    assert share_of_processors([0, 1], [(0,), (1,)], 3) == (0,)


def test_workers_lend_each_other_their_processors(tmp_path: Path) -> None:
    places = places_of([(4,), (5, 7)], [1, 2], tmp_path)
    config = WorkerConfig(role="decode")
    placed = [place.applied_to(config) for place in places]
    assert [(each.cpus, each.threads) for each in placed] == [((4, 5, 7), 1), ((4, 5, 7), 2)]
    shared = [each.shared_processors for each in placed]
    assert [(each.index, each.sizes) for each in shared if each] == [(0, (1, 2)), (1, (1, 2))]
    assert {each.path for each in shared if each} == set(tmp_path.iterdir())


@pytest.mark.parametrize("own", [[(4,), (4,)], [(4, 5)]], ids=["the same processor", "one worker"])
def test_workers_without_processors_to_lend(tmp_path: Path, own: list[tuple[int, ...]]) -> None:
    places = places_of(own, [1] * len(own), tmp_path)
    assert places == [Place(cpus, 1, cpus, None) for cpus in own]
    placed = places[0].applied_to(WorkerConfig(role="decode"))
    assert placed == WorkerConfig(role="decode", cpus=own[0], threads=1)
    assert places[0].applied_to(WorkerConfig(role="decode", threads=3)).threads == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, True), ({"threads": 2}, False), ({"tensor_parallel_size": 2}, False)],
)
def test_workers_with_chosen_threads_lend_nothing(settings: dict[str, Any], expected: bool) -> None:
    configs = [WorkerConfig(role="prefill"), WorkerConfig(role="decode", **settings)]
    assert lending_is_possible(configs) == expected
