"""Which pools are mapped, what is said of those that are not, and when a mapping ends."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from quire.engine.kv_cache.shared_memory import allocate_shared
from quire.kvtransfer.errors import NotSharedError, ProtocolError, SenderGoneError
from quire.kvtransfer.frame import Transport
from quire.kvtransfer.transports import pool_socket, shared
from quire.kvtransfer.transports.messages import Messages
from quire.kvtransfer.transports.pool_socket import (
    PoolSocket,
    fetch_pool,
    open_directory,
    remove_dead_sockets,
)
from quire.kvtransfer.transports.shared import PeerPool, SharedPools
from quire.protos import kvtransfer_pb2 as pb
from tests.testing.transport_pair import SENDER_EPOCH, WAIT_SECONDS, Pair, running_pair
from tests.testing.until import until

FIRST_TOKEN = 42
NUM_BYTES = 1 << 16

HOLDER = """
import asyncio, fcntl, mmap, os, sys
from pathlib import Path
from quire.kvtransfer.transports.pool_socket import PoolSocket

async def main():
    descriptor = os.memfd_create("quire-test-pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 16)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    PoolSocket(Path(sys.argv[1]), sys.argv[2], descriptor)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
"""A process that shares a pool of 64 KiB until it is killed."""


def num_mappings(name: str) -> int:
    """Return how often memory of this name is mapped in this process."""
    return Path("/proc/self/maps").read_text().count(f"memfd:{name}")


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def start_holder(directory: Path, epoch: str) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", HOLDER, str(directory), epoch]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


async def push_one(pair: Pair, ticket_id: str) -> Transport:
    """Push a block and return how it came."""
    pair.sink.tickets[ticket_id] = 3
    async with pair.push(1, ticket_id=ticket_id) as push:
        await push.send(pair.pool.prompt(0, 1))
        summary = await push.commit(FIRST_TOKEN)
    assert pair.sink.targets[ticket_id].held == pair.expected(0, 1)
    return summary.transport


def mapped_epochs(pair: Pair) -> set[str]:
    assert isinstance(pair.receiver, SharedPools)
    return pair.receiver.mapped_epochs


# --- what is chosen ---------------------------------------------------------------------------------------


async def test_workers_of_one_host_share_pools_and_log_it_once(directory: Path) -> None:
    async with running_pair(directory) as pair:
        assert [await push_one(pair, f"t{number}") for number in range(3)] == ["shared"] * 3
        assert pair.told == [(SENDER_EPOCH, "shared", "")]
        assert mapped_epochs(pair) == {SENDER_EPOCH}


def directory_of(pair: Pair) -> Path:
    assert isinstance(pair.sender, SharedPools)
    return pair.sender._directory


def another_host(pair: Pair) -> None:
    pair.sender.offer.boot_id = "another"


def no_socket(pair: Pair) -> None:
    next(directory_of(pair).glob("*.sock")).unlink()


def another_user(pair: Pair) -> None:
    assert isinstance(pair.sender, SharedPools)
    assert pair.sender._socket is not None
    pair.sender._socket._user_id += 1


def a_name_that_leads_elsewhere(pair: Pair) -> None:
    pair.sender.offer.epoch = "../elsewhere"


def another_epoch(pair: Pair) -> None:
    path = next(directory_of(pair).glob("*.sock"))
    path.rename(path.with_name("sender-2.sock"))
    pair.sender.offer.epoch = "sender-2"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_host, "it runs on another host"),
        (no_socket, "No such file"),
        (another_user, "refused to share its pool with this user"),
        (a_name_that_leads_elsewhere, "letters, digits and hyphens"),
        (another_epoch, "another start of the worker"),
    ],
)
async def test_a_pool_that_cannot_be_shared_falls_back_to_messages_and_logs_the_reason(
    directory: Path, change: Callable[[Pair], None], reason: str
) -> None:
    async with running_pair(directory) as pair:
        change(pair)
        assert [await push_one(pair, f"t{number}") for number in range(3)] == ["messages"] * 3
        [(_, transport, told)] = pair.told
        assert transport == "messages"
        assert reason in told
        assert mapped_epochs(pair) == set()


async def test_another_user_at_the_socket_is_not_trusted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pair(directory):
        monkeypatch.setattr(pool_socket, "peer_user", lambda connection: os.geteuid() + 1)
        with pytest.raises(NotSharedError, match="belongs to user"):
            await fetch_pool(directory, SENDER_EPOCH)


async def test_a_worker_that_shares_nothing_sends_messages(directory: Path) -> None:
    async with running_pair(directory, sender="messages") as pair:
        assert await push_one(pair, "t") == "messages"
        assert pair.told == [("", "messages", "it shares no pool")]


async def test_nothing_is_logged_when_messages_are_chosen(directory: Path) -> None:
    async with running_pair(directory, receiver="messages") as pair:
        assert await push_one(pair, "t") == "messages"
        assert pair.told == []


async def test_a_sender_that_must_share_sends_no_message(directory: Path) -> None:
    async with running_pair(directory, receiver="messages") as pair:
        pair.sender.allowed = frozenset({Transport.SHARED})
        with pytest.raises(NotSharedError, match="this one allows shared"):
            await push_one(pair, "t")


async def test_a_pool_that_may_shrink_is_not_mapped(directory: Path) -> None:
    descriptor = os.memfd_create("quire-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, NUM_BYTES)
    held = PoolSocket(directory, "unsealed", descriptor)
    with pytest.raises(NotSharedError, match="may shrink"):
        await fetch_pool(directory, "unsealed")
    held.close()
    os.close(descriptor)


# --- peers that do not answer -----------------------------------------------------------------------------


@pytest.fixture
def silent(directory: Path) -> Iterator[socket.socket]:
    """Return the socket of a process that accepts no connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "silent.sock"))
        listener.listen()
        listener.setblocking(False)
        yield listener


def num_waiting(listener: socket.socket) -> int:
    """Accept and end the connections that wait at a socket; return how many they were."""
    for number in count():
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return number
    raise AssertionError


async def test_a_process_that_does_not_answer_is_given_up(
    directory: Path, silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_socket, "FETCH_SECONDS", 0.05)
    with pytest.raises(NotSharedError, match="did not answer within"):
        await fetch_pool(directory, "silent")


async def test_a_silent_peer_does_not_delay_the_blocks_of_others(
    directory: Path, silent: socket.socket, borrower: SharedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_socket, "FETCH_SECONDS", 10 * WAIT_SECONDS)
    lender = SharedPools(directory)
    descriptor = allocate_shared(NUM_BYTES).descriptor
    lender.share("mapped", descriptor)
    mapped = await map_pool_of(borrower, "mapped")
    held = PoolSocket(directory, "new", descriptor)
    # More waiting calls than the event loop has threads.
    waiting = [asyncio.create_task(map_pool_of(borrower, "silent")) for _ in range(64)]
    await until(lambda: "silent" in borrower._fetches)
    async with asyncio.timeout(WAIT_SECONDS):
        assert await map_pool_of(borrower, "mapped") is mapped
        await map_pool_of(borrower, "new")
        await asyncio.to_thread(int)
    assert not any(each.done() for each in waiting)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    held.close()
    lender.close()


async def test_a_pool_that_could_not_be_mapped_is_asked_for_again_after_a_pause(
    directory: Path, silent: socket.socket, borrower: SharedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_socket, "FETCH_SECONDS", 0.05)
    offer = pb.SharedPool(boot_id=pool_socket.boot_id(), epoch="silent")
    intakes = await asyncio.gather(*(borrower.choose(offer) for _ in range(8)))
    assert all(isinstance(each, Messages) for each in intakes)
    assert isinstance(await borrower.choose(offer), Messages)
    assert num_waiting(silent) == 1
    monkeypatch.setattr(shared, "FAILED_SECONDS", 0.0)
    another = SharedPools(directory)
    for _ in range(2):
        assert isinstance(await another.choose(offer), Messages)
        assert num_waiting(silent) == 1
        await until(lambda: not another._fetches)


async def test_a_cancelled_caller_does_not_cancel_the_mapping_for_the_others(
    directory: Path, borrower: SharedPools
) -> None:
    held = PoolSocket(directory, "epoch", allocate_shared(NUM_BYTES).descriptor)
    cancelled, other = [asyncio.create_task(map_pool_of(borrower, "epoch")) for _ in range(2)]
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await other).connection.fileno() != -1
    assert borrower.mapped_epochs == {"epoch"}
    held.close()


@pytest.mark.parametrize("step", ["socket", "connect", "recv_fds", "mmap"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
async def test_a_mapping_that_fails_at_any_step_is_undone_and_blocks_are_sent_in_messages(
    directory: Path, borrower: SharedPools, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    held = PoolSocket(directory, "epoch", allocate_shared(NUM_BYTES).descriptor)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    class Unconnected(socket.socket):
        connect = fail

    names_before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        if step == "mmap":
            patch.setattr(mmap, "mmap", fail)
        else:
            name, failing = ("socket", Unconnected) if step == "connect" else (step, fail)
            patch.setattr(socket, name, failing)
        offer = pb.SharedPool(boot_id=pool_socket.boot_id(), epoch="epoch")
        assert isinstance(await borrower.choose(offer), Messages)
    await until(lambda: not held._connections)
    assert os.listdir("/proc/self/fd") == names_before
    held.close()


# --- when a mapping ends ----------------------------------------------------------------------------------


@pytest.fixture
async def borrower(directory: Path) -> AsyncIterator[SharedPools]:
    taking = SharedPools(directory)
    yield taking
    taking.close()


async def map_pool_of(borrower: SharedPools, epoch: str) -> PeerPool:
    offer = pb.SharedPool(boot_id=pool_socket.boot_id(), epoch=epoch)
    pool = await borrower.choose(offer)
    assert isinstance(pool, PeerPool)
    return pool


async def test_the_memory_of_a_killed_worker_is_unmapped(directory: Path, borrower: SharedPools) -> None:
    name = "quire-test-pool"
    holder = start_holder(directory, "killed")
    try:
        assert holder.stdout is not None
        assert await asyncio.to_thread(holder.stdout.readline) == b"ready\n"
        pool = await map_pool_of(borrower, "killed")
        assert num_mappings(name) == 1
        frame = pool.frame(pb.BlockFrame(block_id=1), 1 << 12)
        holder.send_signal(signal.SIGKILL)
        await until(lambda: not borrower.mapped_epochs)
        assert bytes(frame.payload) == bytes(1 << 12), "a copy that is being made still ends"
        with pytest.raises(SenderGoneError):
            pool.frame(pb.BlockFrame(block_id=1), 1 << 12)
        del frame
        assert num_mappings(name) == 0
    finally:
        holder.kill()
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    with pytest.raises(AssertionError):
        await map_pool_of(borrower, "killed")
    remove_dead_sockets(directory)
    assert names(directory) == []


async def test_a_worker_that_stops_removes_its_pool(directory: Path, borrower: SharedPools) -> None:
    lender = SharedPools(directory)
    memory = allocate_shared(NUM_BYTES)
    num_before = num_mappings("quire-kv")
    lender.share("first", memory.descriptor)
    await map_pool_of(borrower, "first")
    assert num_mappings("quire-kv") == num_before + 1
    lender.close()
    await until(lambda: not borrower.mapped_epochs)
    assert num_mappings("quire-kv") == num_before
    assert names(directory) == []
    lender.share("second", memory.descriptor)
    await map_pool_of(borrower, "second")
    assert borrower.mapped_epochs == {"second"}
    lender.close()


async def test_a_disconnected_reader_is_forgotten(directory: Path) -> None:
    lender, borrower = SharedPools(directory), SharedPools(directory)
    lender.share("epoch", allocate_shared(NUM_BYTES).descriptor)
    await map_pool_of(borrower, "epoch")
    assert lender._socket is not None
    assert len(lender._socket._connections) == 1
    borrower.close()
    await until(lambda: lender._socket is not None and not lender._socket._connections)
    lender.close()


async def test_concurrent_pushes_map_a_pool_once(directory: Path, borrower: SharedPools) -> None:
    lender = SharedPools(directory)
    lender.share("epoch", allocate_shared(NUM_BYTES).descriptor)
    pools = await asyncio.gather(*(map_pool_of(borrower, "epoch") for _ in range(8)))
    assert len(set(map(id, pools))) == 1
    assert lender._socket is not None
    assert len(lender._socket._connections) == 1
    lender.close()


# --- what others can do -----------------------------------------------------------------------------------


async def test_others_can_read_the_pool_but_neither_write_nor_resize_it(directory: Path) -> None:
    memory = allocate_shared(NUM_BYTES)
    held = PoolSocket(directory, "epoch", memory.descriptor)
    mapping, connection = await fetch_pool(directory, "epoch")
    memory.bytes[7] = 9
    assert mapping[7] == 9
    with pytest.raises(TypeError):
        mapping[7] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, NUM_BYTES)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, NUM_BYTES // 2)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    connection.close()
    held.close()


def test_the_directory_must_be_the_users_own(directory: Path) -> None:
    assert open_directory(directory / "made").stat().st_mode & 0o777 == 0o700
    (directory / "open").mkdir(mode=0o755)
    with pytest.raises(OSError, match="mode 0700"):
        open_directory(directory / "open")
    (directory / "link").symlink_to(directory / "made")
    with pytest.raises(OSError, match="mode 0700"):
        open_directory(directory / "link")


async def test_only_the_sockets_of_dead_workers_are_removed(directory: Path) -> None:
    alive = PoolSocket(directory, "alive", allocate_shared(NUM_BYTES).descriptor)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "dead.sock"))
    remove_dead_sockets(directory)
    assert names(directory) == ["alive.sock"]
    alive.close()


async def test_a_path_that_is_too_long_shares_nothing(directory: Path) -> None:
    long = directory / ("long" * 30)
    with pytest.raises(OSError, match="too long"):
        SharedPools(long).share("epoch", allocate_shared(NUM_BYTES).descriptor)


async def test_without_an_offer_blocks_are_sent_in_messages(borrower: SharedPools) -> None:
    assert isinstance(await borrower.choose(pb.SharedPool()), Messages)


@pytest.mark.parametrize(
    ("frame_ids", "sizes"),
    [
        ([0, 4], (12, 4, 4)),  # beyond the pool
        ([0, 1], (12, 4, 4)),  # neither a block nor a bare one
        ([0, 1, 2], (12,)),  # blocks are one piece
    ],
)
def test_frames_that_are_no_block_are_refused(frame_ids: list[int], sizes: tuple[int, ...]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, 16) as mapping:
        pool = PeerPool(mapping, ours)
        with pytest.raises(ProtocolError, match="block 7 is not in the sender's pool"):
            list(pool.frames([pb.BlockFrame(index=7, frame_ids=frame_ids)], *sizes))
        pool.close()


def test_the_frames_of_a_block_are_joined() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, 16) as mapping:
        mapping[:] = b"aaaabbbbccccdddd"
        pool = PeerPool(mapping, ours)
        messages = [pb.BlockFrame(frame_ids=[3, 0, 1], digest=5), pb.BlockFrame(frame_ids=[2])]
        whole, bare = pool.frames(messages, 12, 4, 4)
        assert (whole.payload, whole.digest, bare.payload) == (b"ddddaaaabbbb", 5, b"cccc")
        pool.close()
