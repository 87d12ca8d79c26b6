"""Hands the descriptor of a worker's pool to other processes of the same user, over a Unix socket.

::

    holder of the pool                              other worker
    serve_pool: <directory>/<epoch>.sock  ◄──────── fetch_pool: connects
    checks the user id (SO_PEERCRED)
    sends its epoch and the descriptor    ────────► checks user id, epoch, seals and size; maps it read-only
    keeps the connection open             ◄───────► keeps the connection open

The connection shows that both processes live: the kernel closes it when either one ends.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import re
import socket
import stat
import struct
import tempfile
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from quire.kvtransfer.errors import NotSharedError

logger = logging.getLogger("quire.kvtransfer")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FETCH_SECONDS = 2.0
"""Time limit for the answer of the process that owns a pool."""
ACCEPT_AGAIN_SECONDS = 1.0
"""Pause after a connection could not be accepted for lack of descriptors or memory."""
OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_EPOCH = re.compile(r"[0-9A-Za-z-]{1,64}")
_MAX_EPOCH_BYTES = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


@cache
def boot_id() -> str:
    """Return the kernel's boot id; empty if the system has none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def default_directory() -> Path:
    """Return the directory of the sockets of this user's workers."""
    return Path(tempfile.gettempdir(), f"quire-{os.geteuid()}")


def open_directory(path: Path) -> Path:
    """Create a directory that only this user may enter, or check that an existing one is like this.

    Raises:
        OSError: it cannot be created, belongs to another user, or others may enter it.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{path} must be a directory of this user with mode 0700")
    return path


class PoolSocket:
    """A socket at which other workers of this user get the descriptor of this worker's pool."""

    def __init__(self, directory: Path, epoch: str, descriptor: int) -> None:
        self._epoch = epoch
        self._descriptor = descriptor
        self._user_id = os.geteuid()
        self._connections: set[socket.socket] = set()
        remove_dead_sockets(directory)
        self._path = socket_path(directory, epoch)
        self._listener = _listen(self._path)
        self._pause: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """End all connections, after which the others unmap the pool, and remove the socket."""
        if self._pause is not None:
            self._pause.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for connection in list(self._connections):
            self._drop(connection)

    def _resume(self) -> None:
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # The connection remains in the queue, and the socket readable. Without a pause the loop would
            # spin.
            if error.errno in OUT_OF_RESOURCES:
                logger.warning("pool_socket_pauses", extra={"fields": {"error": str(error)}})
                loop.remove_reader(self._listener)
                self._pause = loop.call_later(ACCEPT_AGAIN_SECONDS, self._resume)
            return
        self._connections.add(connection)
        try:
            connection.setblocking(False)
            loop.add_reader(connection, self._drop, connection)
            if peer_user(connection) != self._user_id:
                self._drop(connection)
                return
            socket.send_fds(connection, [self._epoch.encode()], [self._descriptor])
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        """End a connection. The other side sends nothing, so a readable connection has ended."""
        asyncio.get_running_loop().remove_reader(connection)
        self._connections.discard(connection)
        connection.close()


async def fetch_pool(directory: Path, epoch: str) -> tuple[mmap.mmap, socket.socket]:
    """Map the pool of the worker with this epoch, read-only; return it and the open connection.

    This may wait for ``FETCH_SECONDS``. It does not wait in a thread, since processes that do not answer must
    not use up the threads that copy blocks.

    Raises:
        NotSharedError: the worker is not reachable or runs as another user, or its memory is not a sealed
            pool of this size.
    """
    with ExitStack() as undo:
        try:
            connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.setblocking(False)
            connection.connect(str(socket_path(directory, epoch)))
            if (user := peer_user(connection)) != os.geteuid():
                raise NotSharedError(f"its process belongs to user {user}, this one to user {os.geteuid()}")
            await _until_readable(connection)
            mapping = _map(*_receive(connection), epoch)
        except OSError as error:
            raise NotSharedError(f"its socket in {directory} cannot be used: {error}") from error
        undo.pop_all()
    return mapping, connection


async def _until_readable(connection: socket.socket) -> None:
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, is_readable.set)
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            await is_readable.wait()
    except TimeoutError as error:
        raise NotSharedError(f"its process did not answer within {FETCH_SECONDS:g} s") from error
    finally:
        loop.remove_reader(connection)


def _receive(connection: socket.socket) -> tuple[int, str]:
    message, descriptors, flags, _ = socket.recv_fds(connection, _MAX_EPOCH_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        if flags & socket.MSG_CTRUNC:
            raise NotSharedError("this process has too many open files to get its pool")
        raise NotSharedError("its process refused to share its pool with this user")
    return descriptors[0], message.decode("ascii", "replace")


def _map(descriptor: int, actual_epoch: str, epoch: str) -> mmap.mmap:
    try:
        if actual_epoch != epoch:
            raise NotSharedError("its socket is that of another start of the worker")
        # Without this seal the memory could shrink, and reading it would end this process with SIGBUS.
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise NotSharedError("its pool may shrink")
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ)
    except ValueError as error:
        raise NotSharedError(f"its pool cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user_id: int = _CREDENTIALS.unpack(credentials)[1]
    return user_id


def socket_path(directory: Path, epoch: str) -> Path:
    """Return the path of a worker's socket.

    Raises:
        NotSharedError: the epoch, which another process may have sent, is not a file name.
    """
    if not _EPOCH.fullmatch(epoch):
        raise NotSharedError("its epoch is not made of letters, digits and hyphens")
    return directory / f"{epoch}.sock"


def remove_dead_sockets(directory: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in directory.glob("*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


def _listen(path: Path) -> socket.socket:
    """Return a socket that listens at a path. It gets this name only when it listens."""
    unfinished = path.with_suffix(".new")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(unfinished))
        listener.listen(128)
        unfinished.rename(path)
    except BaseException:
        listener.close()
        unfinished.unlink(missing_ok=True)
        raise
    return listener
