"""The processors of machines and the quotas of containers, in files as Linux writes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from quire.engine.runner.control_groups import ControlGroups
from quire.engine.runner.processors import Core, as_ranges, num_cores, read_cores, share_of_quota
from tests.testing.machines import DESKTOP, EPYC, TWO_SOCKETS, write_system


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 8),
    ],
)
def test_the_quota_of_cgroups_version_2(tmp_path: Path, text: str, expected: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert num_cores(tmp_path / "none", ControlGroups(tmp_path, tmp_path / "own")) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", 8), ("300000\n", 3), ("20000\n", 1)])
def test_the_quota_of_cgroups_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_cores(tmp_path / "none", ControlGroups(tmp_path, tmp_path / "own")) == expected


def test_without_cgroups_the_processors_count(tmp_path: Path) -> None:
    assert num_cores(tmp_path / "none", ControlGroups(tmp_path, tmp_path / "own")) == 8


def test_the_smallest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "pods" / "one").mkdir(parents=True)
    (tmp_path / "own").write_text("1:cpuset:/elsewhere\n0::/pods/one\n")
    (tmp_path / "pods" / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    assert num_cores(tmp_path / "none", ControlGroups(tmp_path, tmp_path / "own")) == 4
    (tmp_path / "own").write_text("0::/a/path/of/the/host\n")
    assert num_cores(tmp_path / "none", ControlGroups(tmp_path, tmp_path / "own")) == 8


def test_a_nested_quota_of_cgroups_version_1(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "pod").mkdir(parents=True)
    (tmp_path / "own").write_text("4:cpu,cpuacct:/pod\n")
    (tmp_path / "cpu" / "pod" / "cpu.cfs_quota_us").write_text("500000\n")
    (tmp_path / "cpu" / "pod" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_cores(tmp_path / "none", ControlGroups(tmp_path, tmp_path / "own")) == 5


@pytest.mark.parametrize(
    ("quota", "num_workers", "expected"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (2, 3, [1, 1, 1]), (0.5, 1, [1])]
)
def test_workers_divide_the_quota(
    tmp_path: Path, quota: float, num_workers: int, expected: list[int]
) -> None:
    groups = ControlGroups(tmp_path, tmp_path / "own")
    assert share_of_quota(num_workers, 0, groups) == sys.maxsize
    (tmp_path / "cpu.max").write_text(f"{int(quota * 100000)} 100000\n")
    assert [share_of_quota(num_workers, index, groups) for index in range(num_workers)] == expected


@pytest.mark.parametrize("cores", [DESKTOP, TWO_SOCKETS, EPYC], ids=["desktop", "two sockets", "epyc"])
def test_cores_of_one_cache_are_side_by_side(tmp_path: Path, cores: list[Core]) -> None:
    processors = [processor for core in cores for processor in core.processors]
    assert read_cores(processors, write_system(tmp_path, cores)) == cores


def test_of_a_core_only_the_allowed_processors_count(tmp_path: Path) -> None:
    system = write_system(tmp_path, TWO_SOCKETS)
    assert read_cores({25, 9, 0, 17}, system) == [
        Core(0, 0, 0, 0, (0,)),
        Core(0, 0, 0, 1, (17,)),
        Core(1, 1, 8, 9, (9, 25)),
    ]


def test_without_a_description_each_processor_is_a_core(tmp_path: Path) -> None:
    assert read_cores([1, 0], tmp_path) == [Core(0, 0, 0, 0, (0,)), Core(0, 0, 0, 1, (1,))]


def test_a_system_that_knows_few_of_its_parts(tmp_path: Path) -> None:
    system = write_system(tmp_path, DESKTOP)
    for processor in range(8):
        (system / "cpu" / f"cpu{processor}" / "topology" / "physical_package_id").write_text("-1\n")
        (system / "cpu" / f"cpu{processor}" / "cache" / "index3" / "shared_cpu_list").write_text("\n")
    assert read_cores(range(8), system) == DESKTOP


def test_hyper_threads_share_a_thread_of_computation(tmp_path: Path) -> None:
    system, groups = write_system(tmp_path / "sys", DESKTOP), ControlGroups(tmp_path, tmp_path / "own")
    assert num_cores(system, groups) == 4
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    assert num_cores(system, groups) == 3


def test_processors_are_written_as_linux_does() -> None:
    assert [as_ranges(each) for each in ((), (3,), (9, 0, 1, 2, 8), (1, 3))] == ["", "3", "0-2,8-9", "1,3"]
