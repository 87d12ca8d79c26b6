"""The disk cache apart from the tiers: what it keeps, what it refuses, and what it does with bad files."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from quire.engine.kv_cache import disk_cache
from quire.engine.kv_cache.disk_cache import FAILED_SECONDS, DiskCache, DiskCacheError
from tests.testing.manual_clock import ManualClock
from tests.testing.manual_disk import ManualExecutor, open_disk

BLOCK_BYTES = 64
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def later() -> ManualExecutor:
    return ManualExecutor()


def name(word: str) -> bytes:
    return word.encode().ljust(16, b"_")


def content(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_BYTES // 16)


def store(disk: DiskCache, *words: str) -> None:
    for word in words:
        disk.store(name(word), None, content(name(word)))


def read(disk: DiskCache, word: str, later: ManualExecutor) -> tuple[str, bytes]:
    """Read a block; return the failure, and the bytes."""
    target = bytearray(BLOCK_BYTES)
    disk.read(name(word), memoryview(target))
    later.run()
    [failure] = [each.failure for each in disk.drain_finished() if each.is_read]
    return failure, bytes(target)


def test_a_block_is_read_from_memory_until_it_is_written(tmp_path: Path, later: ManualExecutor) -> None:
    reader = ManualExecutor()
    disk = open_disk(tmp_path, later, reader)
    store(disk, "a")
    assert read(disk, "a", reader) == ("", content(name("a")))
    assert not list(tmp_path.glob("*.kv"))
    later.run()
    assert read(disk, "a", reader) == ("", content(name("a")))
    assert [path.name for path in tmp_path.glob("*.kv")] == [f"{name('a').hex()}.kv"]
    disk.close()


def test_a_removed_and_stored_block_is_read_before_it_is_written_again(tmp_path: Path) -> None:
    writer, reader = ManualExecutor(), ManualExecutor()
    disk = open_disk(tmp_path, writer, reader)
    block = name("a")
    disk.store(block, None, bytes(content(block)))
    disk.discard(block)
    disk.store(block, None, bytes(bytearray(content(block))))
    for _ in range(2):  # the first write and the removal
        writer.calls.pop(0)()
    assert [each.failure for each in disk.drain_finished()] == [""]
    target = bytearray(BLOCK_BYTES)
    disk.read(block, memoryview(target))
    reader.run()
    assert [(each.is_read, each.failure) for each in disk.drain_finished()] == [(True, "")]
    assert target == content(block)
    writer.run()
    assert [each.is_read for each in disk.drain_finished()] == [False]
    disk.read(block, memoryview(target))  # from its file
    reader.run()
    assert [each.failure for each in disk.drain_finished()] == [""]
    disk.close()


def test_writes_that_wait_are_bounded(
    tmp_path: Path, later: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.kv_cache.disk_cache.MAX_PENDING_BYTES", 2 * BLOCK_BYTES)
    disk = open_disk(tmp_path, later)
    store(disk, "a", "b")
    assert not disk.can_store
    later.run()
    assert [each.failure for each in disk.drain_finished()] == ["", ""]
    assert disk.can_store
    disk.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda payload: payload[:-1], "truncated"),
        (lambda payload: payload[:10], "truncated"),
        (lambda payload: payload + b"x", "truncated"),
        (lambda payload: payload[:-1] + bytes([payload[-1] ^ 1]), "corrupt"),
        (lambda payload: b"another!" + payload[8:], "corrupt"),
    ],
)
def test_a_damaged_file_fails_its_read(
    tmp_path: Path, later: ManualExecutor, damage: Callable[[bytes], bytes], reason: str
) -> None:
    disk = open_disk(tmp_path, later)
    store(disk, "a")
    later.run()
    list(disk.drain_finished())
    path = tmp_path / f"{name('a').hex()}.kv"
    path.write_bytes(damage(path.read_bytes()))
    assert read(disk, "a", later)[0] == reason
    path.unlink()
    assert read(disk, "a", later)[0] == "read"
    disk.close()


def test_a_file_under_the_name_of_another_block_fails_its_read(tmp_path: Path, later: ManualExecutor) -> None:
    disk = open_disk(tmp_path, later)
    store(disk, "a", "b")
    later.run()
    list(disk.drain_finished())
    (tmp_path / f"{name('a').hex()}.kv").rename(tmp_path / f"{name('b').hex()}.kv")
    assert read(disk, "b", later)[0] == "corrupt"
    disk.close()


def test_a_later_process_takes_over_the_blocks_of_the_same_identity(
    tmp_path: Path, later: ManualExecutor
) -> None:
    disk = open_disk(tmp_path, later)
    store(disk, "a")
    disk.store(name("ab"), name("a"), content(name("ab")))
    disk.close()
    (tmp_path / "unfinished.tmp").write_bytes(b"half")
    (tmp_path / f"{name('c').hex()}.kv").write_bytes(b"too short")
    disk = open_disk(tmp_path, later)
    assert disk.parents == {name("a"): None, name("ab"): name("a")}
    assert read(disk, "ab", later) == ("", content(name("ab")))
    disk.close()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", "", ".kv", ".kv"]
    disk = open_disk(tmp_path, later, identity="another")
    assert not len(disk)
    assert not list(tmp_path.glob("*.kv"))
    disk.close()


def test_a_damaged_identity_counts_as_another_one(tmp_path: Path, later: ManualExecutor) -> None:
    disk = open_disk(tmp_path, later)
    store(disk, "a")
    disk.close()
    marker = tmp_path / "identity"
    identity = marker.read_bytes()
    marker.write_bytes(bytes([identity[0] | 0x80]) + identity[1:])
    disk = open_disk(tmp_path, later)
    assert not len(disk)
    assert marker.read_bytes() == identity
    disk.close()


def test_subscribers_are_called_after_each_read(tmp_path: Path, later: ManualExecutor) -> None:
    disk = open_disk(tmp_path, later)
    failures: list[list[str]] = []
    for _ in range(2):
        disk.subscribe(lambda: failures.append([each.failure for each in disk.drain_finished()]))
    store(disk, "a")
    later.run()
    assert not failures
    disk.read(name("a"), memoryview(bytearray(BLOCK_BYTES)))
    later.run()
    assert failures == [["", ""], []]  # the write and the read; the first subscriber has taken both
    disk.close()


def test_a_folder_has_one_user(tmp_path: Path, later: ManualExecutor) -> None:
    disk = open_disk(tmp_path / "blocks", later)
    with pytest.raises(DiskCacheError, match="another worker uses"):
        open_disk(tmp_path / "blocks", later)
    disk.close()
    open_disk(tmp_path / "blocks", later).close()
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, later: ManualExecutor) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskCacheError, match="no disk cache in"):
        open_disk(tmp_path / "file" / "blocks", later)
    with pytest.raises(DiskCacheError, match="holds no block"):
        open_disk(tmp_path, later, num_blocks=0)


# --- disks that are full or fail ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def failures(disk: DiskCache) -> list[str]:
    """Return the failures of the writes that have ended; what failed is discarded, as the tiers do."""
    ended = list(disk.drain_finished())
    for each in ended:
        if each.failure:
            disk.discard(each.block_hash)
    return [each.failure for each in ended]


def test_a_full_disk_keeps_no_unfinished_file_and_is_written_again_later(
    small_disk: Path, later: ManualExecutor
) -> None:
    clock = ManualClock()
    block = 24 << 10
    disk = DiskCache(small_disk, 1 << 20, block, "same", writer=later, reader=later, clock=clock)
    for word in "abcdef":
        disk.store(name(word), None, bytes(block))
    later.run()
    assert failures(disk) == ["", "", "write", "write", "write", "write"]
    assert len(disk) == len(list(small_disk.glob("*.kv"))) == 2
    assert not list(small_disk.glob("*.tmp"))
    assert not disk.can_store
    clock.now += FAILED_SECONDS
    assert disk.can_store
    disk.discard(name("a"))
    disk.store(name("f"), None, bytes(block))
    later.run()
    assert failures(disk) == [""]
    for word in "bf":
        disk.discard(name(word))
    later.run()
    disk.close()
    assert sorted(path.name for path in small_disk.iterdir()) == ["identity", "lock"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("step", ["open", "write", "rename"])
def test_a_write_that_fails_at_any_step_leaves_no_file(
    tmp_path: Path, later: ManualExecutor, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    disk = open_disk(tmp_path, later)
    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        place: tuple[object, str] = {
            "open": (disk_cache, "_open_private"),
            "write": (disk_cache, "_digest"),
            "rename": (Path, "rename"),
        }[step]
        patch.setattr(*place, Mock(side_effect=OSError(number, os.strerror(number))))
        store(disk, "a")
        later.run()
    assert failures(disk) == ["write"]
    later.run()
    assert os.listdir("/proc/self/fd") == descriptors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["identity", "lock"]
    disk.close()


def test_a_full_disk_is_reported_once_until_a_write_succeeds(
    tmp_path: Path, later: ManualExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_disk(tmp_path, later, num_blocks=8)
    for words in ("ab", "cd"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", Mock(side_effect=FULL))
            store(disk, *words)
            later.run()
        store(disk, words)
        later.run()
    assert [record.message for record in caplog.records] == ["disk_cache_cannot_write"] * 2
    disk.close()


def test_a_folder_that_fails_at_the_start_is_refused_and_unlocked(
    tmp_path: Path, later: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=FULL))
        with pytest.raises(DiskCacheError, match="No space left on device; free its disk"):
            open_disk(tmp_path, later)
    assert os.listdir("/proc/self/fd") == descriptors
    open_disk(tmp_path, later).close()
