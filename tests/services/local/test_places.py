"""Which processors the workers of one machine use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.engine.runner.processors import Core, as_ranges, read_cores
from quire.services.local.places import (
    Place,
    divide,
    lending_is_possible,
    next_share,
    numbers_by_node,
    places_of,
    processors_of,
)
from quire.services.worker.config import WorkerConfig
from tests.testing.machines import DESKTOP, EPYC, TWO_SOCKETS, write_system


def plain(*processors: int) -> list[Core]:
    return [Core(0, 0, 0, processor, (processor,)) for processor in processors]


def parts(cores: list[Core], num_workers: int) -> list[str]:
    return [as_ranges(processors_of(part)) for part in divide(cores, num_workers)]


def test_processors_are_divided_evenly() -> None:
    taken: list[tuple[int, ...]] = []
    for _ in range(3):
        taken.append(processors_of(next_share(plain(0, 2, 3, 5), taken, 3)))
    assert taken == [(0, 2), (3,), (5,)]


def test_a_later_worker_gets_the_processors_with_the_fewest_workers() -> None:
    assert next_share(plain(0, 1), [(0,), (1,)], 3) == plain(0)
    assert next_share(plain(0, 1, 2, 3), [(0, 1), (2,)], 3) == plain(3)


@pytest.mark.parametrize(
    ("cores", "num_workers", "expected"),
    [
        (DESKTOP, 2, ["0-1,4-5", "2-3,6-7"]),
        (DESKTOP, 3, ["0-1,4-5", "2,6", "3,7"]),
        (TWO_SOCKETS, 1, ["0-31"]),
        (TWO_SOCKETS, 2, ["0-7,16-23", "8-15,24-31"]),
        (TWO_SOCKETS, 3, ["0-3,16-19", "4-7,20-23", "8-15,24-31"]),
        (EPYC, 2, ["0-7,16-23", "8-15,24-31"]),
        (EPYC, 3, ["0-7,16-23", "8-11,24-27", "12-15,28-31"]),
        (EPYC, 5, ["0-1,16-17", "2-3,18-19", "4-7,20-23", "8-11,24-27", "12-15,28-31"]),
    ],
)
def test_workers_divide_nodes_and_caches_first(
    cores: list[Core], num_workers: int, expected: list[str]
) -> None:
    assert parts(cores, num_workers) == expected


@pytest.mark.parametrize("cores", [DESKTOP, TWO_SOCKETS, EPYC], ids=["desktop", "two sockets", "epyc"])
def test_no_processor_has_two_workers_while_there_are_cores(cores: list[Core]) -> None:
    for num_workers in range(1, len(cores) + 1):
        found = divide(cores, num_workers)
        assert len(found) == num_workers
        assert sorted(core for part in found for core in part) == cores
    assert [len(part) for part in divide(cores, len(cores) + 1)] == [1] * (len(cores) + 1)


def test_a_group_of_more_cores_gets_more_workers(tmp_path: Path) -> None:
    allowed = read_cores([0, 1, 2, 3, 4, 5, 8, 9, 25], write_system(tmp_path, TWO_SOCKETS))
    assert parts(allowed, 2) == ["0-5", "8-9,25"]
    assert parts(allowed, 4) == ["0-1", "2-3", "4-5", "8-9,25"]


@pytest.mark.parametrize(
    ("cores", "most", "expected"),
    [
        (EPYC, 64, (1, 1)),
        (TWO_SOCKETS, 64, (1, 1)),
        ([Core(0, node, 0, node, (node,)) for node in range(5)], 64, (2, 3)),
        ([Core(0, node, 0, node, (node,)) for node in range(8)], 4, (2, 2)),
        ([Core(0, node, 0, node, (node,)) for node in range(8)], 1, (1, 1)),
    ],
)
def test_many_nodes_begin_with_a_worker_each(cores: list[Core], most: int, expected: tuple[int, int]) -> None:
    assert tuple(numbers_by_node(cores, most).values()) == expected


def test_workers_lend_each_other_their_processors(tmp_path: Path) -> None:
    places = places_of([plain(4), plain(5, 7)], [1, 2], tmp_path)
    config = WorkerConfig(role="decode")
    placed = [place.applied_to(config) for place in places]
    assert [(each.cpus, each.threads) for each in placed] == [((4, 5, 7), 1), ((4, 5, 7), 2)]
    shared = [each.shared_processors for each in placed]
    assert [(each.index, each.sizes) for each in shared if each] == [(0, (1, 2)), (1, (1, 2))]
    assert {each.path for each in shared if each} == set(tmp_path.iterdir())


def test_workers_lend_only_to_those_of_their_node(tmp_path: Path) -> None:
    places = places_of(divide(TWO_SOCKETS, 4), [4, 4, 4, 2], tmp_path)
    node = [tuple(range(8)) + tuple(range(16, 24)), tuple(range(8, 16)) + tuple(range(24, 32))]
    assert [place.allowed for place in places] == [node[0], node[0], node[1], node[1]]
    shared = [place.shared for place in places if place.shared]
    assert [(each.index, each.sizes) for each in shared] == [
        (0, (4, 4)),
        (1, (4, 4)),
        (0, (4, 2)),
        (1, (4, 2)),
    ]
    assert shared[0].path == shared[1].path != shared[2].path == shared[3].path
    first, second = places_of(divide(TWO_SOCKETS, 2), [8, 8], tmp_path)
    assert (first.shared, second.shared) == (None, None)
    assert not set(first.allowed) & set(second.allowed)


@pytest.mark.parametrize("own", [[(4,), (4,)], [(4, 5)]], ids=["the same processor", "one worker"])
def test_workers_without_processors_to_lend(tmp_path: Path, own: list[tuple[int, ...]]) -> None:
    places = places_of([plain(*cpus) for cpus in own], [1] * len(own), tmp_path)
    assert places == [Place(cpus, 1, cpus, None) for cpus in own]
    placed = places[0].applied_to(WorkerConfig(role="decode"))
    assert placed == WorkerConfig(role="decode", cpus=own[0], threads=1)
    assert places[0].applied_to(WorkerConfig(role="decode", threads=3)).threads == 3
    assert not list(tmp_path.iterdir())


def test_a_place_describes_itself() -> None:
    siblings = Place((0, 1, 8, 9), 2, (0, 1, 8, 9), None)
    assert siblings.description(None) == "processors 0-1,8-9 (2 threads)"
    assert siblings.description(1) == "processors 0-1,8-9 (1 thread)"
    assert Place((3,), 1, (3, 4), None).description(None) == "processor 3"


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, True), ({"threads": 2}, False), ({"tensor_parallel_size": 2}, False)]
)
def test_workers_with_chosen_threads_lend_nothing(settings: dict[str, Any], expected: bool) -> None:
    configs = [WorkerConfig(role="prefill"), WorkerConfig(role="decode", **settings)]
    assert lending_is_possible(configs) == expected
