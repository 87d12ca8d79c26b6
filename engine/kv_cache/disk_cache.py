"""The lowest cache tier: blocks as files, each with a digest that is checked when the file is read.

::

    <folder>/identity          the model and layout of the blocks; blocks of another identity are removed
    <folder>/lock              held while a worker uses the folder
    <folder>/<block hash>.kv   magic (8) | parent hash (16, zeros: none) | digest (8) | the block's bytes

The digest is XXH3-64 of the parent hash and the bytes, seeded with the block hash, so a file under another
block's name fails the check. A file is written under a temporary name and renamed. Nothing is flushed: the
digest detects files that a crash left half-written. Only the engine's thread uses the ledger. Other threads,
which this cache starts, read, write and remove the files. A disk that does not answer delays requests by at
most ``READ_SECONDS``, and the end of the worker by twice ``CLOSE_SECONDS``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Timer
from typing import NamedTuple

from xxhash import xxh3_64

from quire.engine.kv_cache.daemon_threads import DaemonThreads

logger = logging.getLogger(__name__)

HASH_BYTES = 16
_HEADER = struct.Struct("<8s16sQ")
_MAGIC = b"quirekv1"
_NO_PARENT = bytes(HASH_BYTES)
_SUFFIX, _UNFINISHED = ".kv", ".tmp"

MAX_PENDING_BYTES = 64 << 20
"""Most bytes of blocks in the write queue; when it is full, evicted blocks are dropped."""
FAILED_SECONDS = 5.0
"""Seconds without writes after a failed write: a full disk is probably still full."""
READ_SECONDS = 2.0
"""Seconds without the end of a read after which requests no longer wait for the reads that have begun."""
CLOSE_SECONDS = 5.0
"""Most seconds that ``close`` waits for the reads, and for the writes."""
NUM_READERS = 2
STALLED = "stalled"
"""The failure of a read that has not ended in time, and may still end."""


class DiskCacheError(OSError):
    """The folder of the disk cache cannot be used; the message says what to do."""


class FileProblem(Exception):
    """A file does not contain its block. ``reason``, a label of the metrics, is "truncated" or "corrupt"."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Finished(NamedTuple):
    """A read or a write that has ended, or a read that has stalled and ends later.

    Attributes:
        block_hash: the block.
        written: the payload that was written; None for a read.
        failure: the reason of the failure; empty if there was none. ``STALLED`` means that the read goes on.
    """

    block_hash: bytes
    written: bytes | None
    failure: str

    @property
    def is_read(self) -> bool:
        """Whether this was a read, rather than a write."""
        return self.written is None


class DiskCache:
    """Blocks by hash, in files of one folder; the least recently used block is removed first.

    Args:
        folder: the folder, which is created if it does not exist; no other worker may use it.
        num_bytes: most bytes of all files.
        block_bytes: bytes of a block.
        identity: names everything that must be equal for old blocks to be valid: the model, the layout and
            the keys of the hashes.
        writer: runs writes and removals in their order, so a file that is removed and then written again
            exists at the end.
        reader: runs reads.
        clock: returns seconds that never go back.

    Raises:
        DiskCacheError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        num_bytes: int,
        block_bytes: int,
        identity: str,
        *,
        writer: Executor | None = None,
        reader: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_blocks = num_bytes // (block_bytes + _HEADER.size)
        if not self.num_blocks:
            raise DiskCacheError(f"a disk cache of {num_bytes} bytes holds no block of {block_bytes} bytes")
        self._folder = folder
        self._block_bytes = block_bytes
        self._max_pending = max(1, MAX_PENDING_BYTES // block_bytes)
        self._hashes: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, bytes] = {}
        """Blocks that are being written; reads are served from here."""
        self._finished: SimpleQueue[Finished] = SimpleQueue()
        self._reading: set[bytes] = set()
        """Blocks that are being read."""
        self._stalls_at = 0.0
        """When these reads have stalled, unless one of them ends before."""
        self._alarm_at = 0.0
        """When a timer calls the subscribers."""
        self.is_stalled = False
        """Whether reads have stalled, and have not all ended since."""
        self._on_read: list[Callable[[], None]] = []
        self._clock = clock
        self._paused_until = 0.0
        self._is_failing = False
        """Whether the last write failed; only the writer uses it."""
        self._lock = _locked(folder)
        try:
            self.parents = self._recover(identity)
            """Parent hash of each block that was found at the start; None for a prompt's first block."""
        except OSError as error:
            os.close(self._lock)
            raise DiskCacheError(f"the disk cache {folder} cannot be read: {error}; free its disk") from error
        self._writer = writer or DaemonThreads(1, "disk-cache-writer", CLOSE_SECONDS)
        self._reader = reader or DaemonThreads(NUM_READERS, "disk-cache-reader", CLOSE_SECONDS)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._hashes

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)

    def subscribe(self, on_read: Callable[[], None]) -> None:
        """Call ``on_read`` in one of this cache's threads after each read, and when one may have stalled."""
        self._on_read.append(on_read)

    def close(self) -> None:
        """Finish the reads and writes in progress, unless the disk stalls; unlock the folder for others."""
        self._reader.shutdown()
        self._writer.shutdown()
        os.close(self._lock)

    # --- the ledger ---------------------------------------------------------------------------------------

    @property
    def can_store(self) -> bool:
        """Whether another block may be queued to be written."""
        return len(self._pending) < self._max_pending and self._clock() >= self._paused_until

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Mark a prompt's blocks as the most recently used, in an order that evicts children first."""
        for each in reversed(block_hashes):
            if each in self._hashes:
                self._hashes.move_to_end(each)

    def pop_oldest_if_full(self) -> bytes | None:
        """Remove and return the least recently used block if the cache is full, else return None."""
        if len(self._hashes) < self.num_blocks:
            return None
        block_hash = next(iter(self._hashes))
        self.discard(block_hash)
        return block_hash

    def store(self, block_hash: bytes, parent_hash: bytes | None, payload: bytes) -> None:
        """Write a block in the background; it counts as cached immediately."""
        self._hashes[block_hash] = None
        self._pending[block_hash] = payload
        self._writer.submit(self._write, block_hash, parent_hash, payload)

    def discard(self, block_hash: bytes) -> None:
        """Remove a block and, in the background, its file; do nothing if the cache does not have it."""
        if block_hash in self._hashes:
            del self._hashes[block_hash]
            self._writer.submit(self._path(block_hash).unlink, missing_ok=True)

    def read(self, block_hash: bytes, target: memoryview) -> None:
        """Read a block into ``target`` in the background; ``drain_finished`` yields the outcome later.

        Begin no read while the disk is stalled.
        """
        if not self._reading:
            self._stalls_at = self._clock() + READ_SECONDS
        self._reading.add(block_hash)
        self._reader.submit(self._read, block_hash, self._pending.get(block_hash), target)
        self._watch_reads()

    def drain_finished(self) -> Iterator[Finished]:
        """Yield the writes that have ended, and the reads that have ended or stalled, since the last call."""
        while True:
            try:
                finished = self._finished.get_nowait()
            except Empty:
                break
            # If the block was removed and stored again meanwhile, its second write is still pending.
            if finished.written is not None and self._pending.get(finished.block_hash) is finished.written:
                del self._pending[finished.block_hash]
            if finished.written is not None and finished.failure:
                self._paused_until = self._clock() + FAILED_SECONDS
            if finished.is_read:
                self._reading.remove(finished.block_hash)
                self._stalls_at = self._clock() + READ_SECONDS
            yield finished
        self.is_stalled &= bool(self._reading)
        if self._reading and not self.is_stalled and self._clock() >= self._stalls_at:
            self.is_stalled = True
            details = {"folder": str(self._folder), "seconds": READ_SECONDS}
            logger.warning("disk_cache_stalls", extra={"fields": details})
            yield from [Finished(each, None, STALLED) for each in self._reading]
        self._watch_reads()

    def _watch_reads(self) -> None:
        """Start a timer that calls the subscribers when the reads have stalled, unless one is running."""
        now = self._clock()
        if self._reading and not self.is_stalled and now >= self._alarm_at:
            self._alarm_at = max(now, self._stalls_at)
            timer = Timer(self._alarm_at - now, self._call_subscribers)
            timer.daemon = True
            timer.start()

    def _call_subscribers(self) -> None:
        for on_read in self._on_read:
            on_read()

    # --- files --------------------------------------------------------------------------------------------

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / (block_hash.hex() + _SUFFIX)

    def _write(self, block_hash: bytes, parent_hash: bytes | None, payload: bytes) -> None:
        path, failure = self._path(block_hash), ""
        parent = parent_hash or _NO_PARENT
        unfinished = path.with_suffix(_UNFINISHED)
        try:
            with open(unfinished, "wb", opener=_open_private) as file:
                file.write(_HEADER.pack(_MAGIC, parent, _digest(block_hash, parent, payload)))
                file.write(payload)
            unfinished.rename(path)
        except OSError as error:
            failure = "write"
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            if not self._is_failing:
                details = {"folder": str(self._folder), "error": str(error), "pause_seconds": FAILED_SECONDS}
                logger.warning("disk_cache_cannot_write", extra={"fields": details})
        self._is_failing = bool(failure)
        self._finished.put(Finished(block_hash, payload, failure))

    def _read(self, block_hash: bytes, pending: bytes | None, target: memoryview) -> None:
        failure = ""
        try:
            if pending is not None:
                target[:] = pending
            else:
                self._read_file(block_hash, target)
        except OSError:
            failure = "read"
        except FileProblem as problem:
            failure = problem.reason
        self._finished.put(Finished(block_hash, None, failure))
        self._call_subscribers()

    def _read_file(self, block_hash: bytes, target: memoryview) -> None:
        with self._path(block_hash).open("rb", buffering=0) as file:
            parent, expected = _read_header(file.read(_HEADER.size))
            if file.readinto(target) != len(target) or file.read(1):
                raise FileProblem("truncated")
        if _digest(block_hash, parent, target) != expected:
            raise FileProblem("corrupt")

    def _recover(self, identity: str) -> dict[bytes, bytes | None]:
        """Adopt the blocks of an earlier process with the same identity; return the parent of each.

        The oldest files come first in the order of eviction. All other files are removed.
        """
        marker = self._folder / "identity"
        is_same = marker.exists() and marker.read_bytes() == identity.encode()
        found = sorted((path.stat().st_mtime_ns, path) for path in self._folder.glob("*" + _SUFFIX))
        blocks = [(path, block_hash) for _, path in found if (block_hash := _hash_of(path))]
        parents: dict[bytes, bytes | None] = {}
        for index, (path, block_hash) in enumerate(blocks):
            is_wanted = is_same and index >= len(blocks) - self.num_blocks
            parent = self._parent_in(path) if is_wanted else None
            if parent is None:
                path.unlink()
                continue
            parents[block_hash] = None if parent == _NO_PARENT else parent
            self._hashes[block_hash] = None
        for path in self._folder.glob("*" + _UNFINISHED):
            path.unlink()
        if not is_same:
            marker.write_text(identity, "utf-8")
        return parents

    def _parent_in(self, path: Path) -> bytes | None:
        """Return the parent hash in a file's header; None if the file cannot hold a block."""
        if path.stat().st_size != _HEADER.size + self._block_bytes:
            return None
        with path.open("rb") as file:
            try:
                return _read_header(file.read(_HEADER.size))[0]
            except FileProblem:
                return None


def _locked(folder: Path) -> int:
    """Create the folder and lock it; return the lock's file descriptor.

    Only the owner may read the folder, since KV blocks reveal prompts.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskCacheError(f"no disk cache in {folder}: {error}; name another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise DiskCacheError(f"another worker uses the disk cache {folder}; name another folder") from error
    return lock


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _hash_of(path: Path) -> bytes | None:
    try:
        block_hash = bytes.fromhex(path.stem)
    except ValueError:
        return None
    return block_hash if len(block_hash) == HASH_BYTES else None


def _read_header(header: bytes) -> tuple[bytes, int]:
    """Return the parent hash and the digest in a header.

    Raises:
        FileProblem: the bytes are not a header of this format.
    """
    if len(header) != _HEADER.size:
        raise FileProblem("truncated")
    magic, parent, digest = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise FileProblem("corrupt")
    return parent, digest


def _digest(block_hash: bytes, parent: bytes, payload: bytes | memoryview) -> int:
    hasher = xxh3_64(parent, seed=int.from_bytes(block_hash[:8], "little"))
    hasher.update(payload)
    return hasher.intdigest()
