"""A container's quota of processor time, in files as Linux writes them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from quire.services.server.process import num_processors, share_of_quota


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
    assert num_processors(tmp_path, tmp_path / "own") == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1\n", 8), ("300000\n", 3), ("20000\n", 1)])
def test_the_quota_of_cgroups_version_1(tmp_path: Path, quota: str, expected: int) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_processors(tmp_path, tmp_path / "own") == expected


def test_without_cgroups_the_processors_count(tmp_path: Path) -> None:
    assert num_processors(tmp_path, tmp_path / "own") == 8


def test_the_smallest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "pods" / "one").mkdir(parents=True)
    (tmp_path / "own").write_text("1:cpuset:/elsewhere\n0::/pods/one\n")
    (tmp_path / "pods" / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    assert num_processors(tmp_path, tmp_path / "own") == 4
    (tmp_path / "own").write_text("0::/a/path/of/the/host\n")
    assert num_processors(tmp_path, tmp_path / "own") == 8


def test_a_nested_quota_of_cgroups_version_1(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "pod").mkdir(parents=True)
    (tmp_path / "own").write_text("4:cpu,cpuacct:/pod\n")
    (tmp_path / "cpu" / "pod" / "cpu.cfs_quota_us").write_text("500000\n")
    (tmp_path / "cpu" / "pod" / "cpu.cfs_period_us").write_text("100000\n")
    assert num_processors(tmp_path, tmp_path / "own") == 5


@pytest.mark.parametrize(
    ("quota", "num_workers", "expected"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (2, 3, [1, 1, 1]), (0.5, 1, [1])]
)
def test_workers_divide_the_quota(
    tmp_path: Path, quota: float, num_workers: int, expected: list[int]
) -> None:
    own = tmp_path / "own"
    assert share_of_quota(num_workers, 0, tmp_path, own) == sys.maxsize
    (tmp_path / "cpu.max").write_text(f"{int(quota * 100000)} 100000\n")
    assert [share_of_quota(num_workers, index, tmp_path, own) for index in range(num_workers)] == expected
