"""The disk cache apart from the tiers: what it keeps, what it refuses, and what it does with bad files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.engine.disk_cache import DiskCache, DiskCacheError
from tests.engine.manual_disk import ManualExecutor, open_disk

BLOCK_BYTES = 64


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


def test_a_block_that_went_and_came_back_is_read_before_it_is_written_again(tmp_path: Path) -> None:
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


def test_the_least_recently_used_block_is_removed_first(tmp_path: Path, later: ManualExecutor) -> None:
    disk = open_disk(tmp_path, later, num_blocks=3)
    store(disk, "a", "b")
    assert disk.pop_oldest_if_full() is None
    store(disk, "c")
    disk.touch([name("a"), name("b")])
    # Children are evicted before their parents: the chain's last block counts as used before its first.
    assert list(disk) == [name("c"), name("b"), name("a")]
    assert disk.pop_oldest_if_full() == name("c")
    later.run()
    assert len(list(tmp_path.glob("*.kv"))) == len(disk) == 2
    disk.close()


def test_writes_that_wait_are_bounded(
    tmp_path: Path, later: ManualExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.disk_cache.MAX_PENDING_BYTES", 2 * BLOCK_BYTES)
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
