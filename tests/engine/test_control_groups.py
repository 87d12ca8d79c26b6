"""The memory that a container may use; tests/services/server/test_processors.py has its processors."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.runner.control_groups import ControlGroups

UNREADABLE = Path("/proc/self/mem")
"""A file that cannot be read at its beginning, not even by root."""


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_containers_limit_counts_if_it_is_less(tmp_path: Path, name: str) -> None:
    groups = ControlGroups(tmp_path, tmp_path / "own")
    machine = groups.memory_bytes()
    assert machine > 1 << 20
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for text, expected in (("1048576\n", 1 << 20), ("max\n", machine), (f"{2 * machine}\n", machine)):
        (tmp_path / name).write_text(text)
        assert groups.memory_bytes() == expected


@pytest.mark.parametrize(
    ("own", "folder", "name"),
    [
        ("0::/pods/one\n", "", "memory.max"),
        ("4:memory:/pods/one\n0::/elsewhere\n", "memory", "memory.limit_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
def test_the_smallest_limit_of_nested_groups_counts(tmp_path: Path, own: str, folder: str, name: str) -> None:
    groups = ControlGroups(tmp_path, tmp_path / "own")
    (tmp_path / "own").write_text(own)
    group = tmp_path / folder / "pods" / "one"
    group.mkdir(parents=True)
    (group / name).write_text("8388608\n")
    assert groups.memory_bytes() == 8 << 20
    (group.parent / name).write_text("1048576\n")
    assert groups.memory_bytes() == 1 << 20
    (group / name).write_text("524288\n")
    assert groups.memory_bytes() == 1 << 19


@pytest.mark.parametrize("name", ["own", "memory.max", "memory/memory.limit_in_bytes", "cpu.max"])
def test_files_that_cannot_be_read_are_no_limits(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(UNREADABLE)
    groups = ControlGroups(tmp_path, tmp_path / "own")
    with pytest.raises(OSError, match="Input/output error"):
        (tmp_path / name).read_bytes()
    assert groups.num_processors() is None
    assert groups.memory_bytes() == ControlGroups(tmp_path / "none", tmp_path / "none").memory_bytes()
