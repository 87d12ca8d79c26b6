"""What only NIXL has: peers that die or stop in mid-READ, the memory of READs, the ends of agents.

The holders of blocks are processes, and READs go over TCP: only there does a stopped process not answer,
since within a host UCX may read its memory without it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.kvtransfer.errors import ProtocolError, SenderGoneError
from quire.kvtransfer.transports import nixl
from quire.kvtransfer.transports.nixl import NixlAgent
from quire.protos import kvtransfer_pb2 as pb
from tests.kvtransfer.nixl.holder import BLOCK_BYTES, NUM_BLOCKS, content
from tests.testing.commands import run_command

pytestmark = pytest.mark.slow
pytest.importorskip("nixl_cu12", reason="the extra 'nixl' is not installed")

WAIT_SECONDS = 10.0
SHORT_SECONDS = 0.5
ROOT = Path(__file__).parents[3]
POOL = content()


class Holder(NamedTuple):
    """A process with a pool, and what it offers."""

    process: subprocess.Popen[str]
    offer: pb.SharedPool

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait()
        if number is signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)


StartHolder = Callable[[str], Holder]


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "READ_SECONDS", SHORT_SECONDS)


@pytest.fixture
def start_holder() -> Iterator[StartHolder]:
    with ExitStack() as stack:

        def start(epoch: str) -> Holder:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.kvtransfer.nixl.holder", epoch],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            # NIXL logs to its output, too.
            lines = (line.strip() for line in process.stdout)
            line = next(each for each in lines if each and set(each) <= set("0123456789abcdef"))
            return Holder(process, pb.SharedPool.FromString(bytes.fromhex(line)))

        yield start


@pytest.fixture
def agent() -> Iterator[NixlAgent]:
    opened = NixlAgent("reader")
    yield opened
    opened.close()


def read(agent: NixlAgent, holder: Holder, block_ids: list[int]) -> None:
    """Read blocks, and compare them with what they are."""
    got = agent.read(holder.offer, block_ids, BLOCK_BYTES)
    assert got == [POOL[block_id].tobytes() for block_id in block_ids]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("has_read", [False, True])
def test_a_killed_peer_is_an_error_and_its_next_start_is_read(
    agent: NixlAgent, start_holder: StartHolder, has_read: bool
) -> None:
    holder = start_holder("holder-1")
    if has_read:
        read(agent, holder, [3, 1])
    holder.signal(signal.SIGKILL)
    with pytest.raises(SenderGoneError):
        read(agent, holder, [3, 1])
    assert agent.known_epochs == set()
    assert agent.num_free_slabs == nixl.MAX_SLABS
    read(agent, start_holder("holder-2"), list(range(NUM_BLOCKS)))
    assert agent.known_epochs == {"holder-2"}


def test_a_peer_that_is_killed_in_mid_read_is_an_error_at_once(
    agent: NixlAgent, start_holder: StartHolder
) -> None:
    holder = start_holder("holder-1")
    read(agent, holder, [0])
    holder.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, agent, holder, [1, 2])
        wait_until(lambda: agent.num_free_slabs == nixl.MAX_SLABS - 1)
        holder.signal(signal.SIGKILL)
        with pytest.raises(SenderGoneError, match="failed"):
            reading.result(WAIT_SECONDS)
    assert agent.num_free_slabs == nixl.MAX_SLABS
    assert agent.known_epochs == set()


@pytest.mark.usefixtures("short_reads")
def test_a_stopped_peer_occupies_one_slab_until_it_continues(
    agent: NixlAgent, start_holder: StartHolder
) -> None:
    stopped, other = start_holder("stopped"), start_holder("other")
    read(agent, stopped, [0])
    stopped.signal(signal.SIGSTOP)
    with pytest.raises(SenderGoneError, match="did not end"):
        read(agent, stopped, list(range(NUM_BLOCKS)))
    with pytest.raises(SenderGoneError, match="earlier READ"):
        read(agent, stopped, [1])
    for first in range(2 * nixl.MAX_SLABS):
        read(agent, other, [first, first + 1])
    assert agent.num_free_slabs == nixl.MAX_SLABS - 1, "the READ may still write into its slab"
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: agent.num_free_slabs == nixl.MAX_SLABS)
    read(agent, stopped, [5, 6])


@pytest.mark.usefixtures("short_reads")
def test_a_stopped_peer_that_is_killed_gives_its_slab_back(
    agent: NixlAgent, start_holder: StartHolder
) -> None:
    stopped = start_holder("stopped")
    stopped.signal(signal.SIGSTOP)
    with pytest.raises(SenderGoneError, match="did not end"):
        read(agent, stopped, [0])
    assert agent.num_free_slabs == nixl.MAX_SLABS - 1
    stopped.signal(signal.SIGKILL)
    wait_until(lambda: agent.num_free_slabs == nixl.MAX_SLABS)
    assert agent.known_epochs == set()


@pytest.mark.usefixtures("short_reads")
def test_without_a_free_slab_a_read_is_an_error_in_time(
    agent: NixlAgent, start_holder: StartHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MAX_SLABS", 1)
    stopped, other = start_holder("stopped"), start_holder("other")
    stopped.signal(signal.SIGSTOP)
    with pytest.raises(SenderGoneError, match="did not end"):
        read(agent, stopped, [0])
    with pytest.raises(SenderGoneError, match="no READ could begin"):
        read(agent, other, [0])
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: agent.num_free_slabs == 1)
    read(agent, other, [0])


def test_the_peer_that_was_idle_for_longest_makes_room(
    agent: NixlAgent, start_holder: StartHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "MAX_PEERS", 2)
    holders = [start_holder(f"holder-{number}") for number in range(3)]
    for number in (0, 1, 0, 2):
        read(agent, holders[number], [number])
    assert agent.known_epochs == {"holder-0", "holder-2"}
    read(agent, holders[1], [7])
    assert agent.known_epochs == {"holder-1", "holder-2"}
    monkeypatch.setattr(nixl, "IDLE_SECONDS", 0.0)
    read(agent, holders[0], [7])
    assert agent.known_epochs == {"holder-0"}


def test_reads_at_a_time_bring_their_own_bytes(agent: NixlAgent, start_holder: StartHolder) -> None:
    holders = [start_holder(f"holder-{number}") for number in range(2)]
    with ThreadPoolExecutor(8) as pool:
        ids = [[(7 * first + step) % NUM_BLOCKS for step in range(5)] for first in range(64)]
        reads = [pool.submit(read, agent, holders[index % 2], each) for index, each in enumerate(ids)]
        for each in reads:
            each.result(WAIT_SECONDS)
    assert agent.num_free_slabs == nixl.MAX_SLABS


def test_metadata_of_another_start_is_refused(agent: NixlAgent, start_holder: StartHolder) -> None:
    holder = start_holder("holder-1")
    holder.offer.epoch = "holder-2"
    with pytest.raises(ProtocolError, match="another start"):
        read(agent, holder, [0])
    assert agent.known_epochs == set()


def test_closing_ends_a_stuck_read_and_gives_everything_back(start_holder: StartHolder) -> None:
    stopped = start_holder("stopped")
    stopped.signal(signal.SIGSTOP)
    NixlAgent("before").close()  # what the libraries keep for good
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        before = num_threads(), num_descriptors()
        agent = NixlAgent("reader")
        agent.offer(POOL.ctypes.data, POOL.nbytes)
        reading = pool.submit(read, agent, stopped, [0])
        wait_until(lambda: agent.num_free_slabs == nixl.MAX_SLABS - 1)
        agent.close()
        with pytest.raises(SenderGoneError, match="ending"):
            reading.result(WAIT_SECONDS)
        assert (num_threads(), num_descriptors()) == before
    with pytest.raises(SenderGoneError, match="ending"):
        read(agent, stopped, [0])
    agent.close()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_process_with_an_open_agent_ends(start_holder: StartHolder) -> None:
    holder = start_holder("holder-1")
    code = (
        "import sys\n"
        "from quire.kvtransfer.transports.nixl import NixlAgent\n"
        "from quire.protos import kvtransfer_pb2 as pb\n"
        "agent = NixlAgent('reader')\n"
        "agent.read(pb.SharedPool.FromString(bytes.fromhex(sys.argv[1])), [0], int(sys.argv[2]))\n"
    )
    arguments = holder.offer.SerializeToString().hex(), str(BLOCK_BYTES)
    run_command(sys.executable, "-c", code, *arguments, timeout=WAIT_SECONDS)
    read_again = NixlAgent("another")
    read(read_again, holder, [1])
    read_again.close()


def test_the_threads_of_an_agent_that_does_nothing_sleep() -> None:
    def threads() -> set[Path]:
        return set(Path("/proc/self/task").iterdir())

    def sleeps(thread: Path) -> bool:
        return thread.joinpath("stat").read_text().rpartition(") ")[2][0] == "S"

    before = threads()
    agent = NixlAgent("idle")
    agent.offer(POOL.ctypes.data, POOL.nbytes)
    own = threads() - before
    assert own
    # A thread that polls without a pause never sleeps.
    wait_until(lambda: all(map(sleeps, own)))
    agent.close()
