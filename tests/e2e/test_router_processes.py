"""Several router processes on the same ports: each serves, is started again, and none outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
import pytest

from quire.client import Client, QuireError
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from tests.testing.commands import run_command
from tests.testing.processes import QUIRE, children_of, have_ended, serving
from tests.testing.until import until

LISTENING = "0A"


def answers(address: str) -> bool:
    """Return whether a new connection gets an answer."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            GenerationServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def is_ready(address: str) -> bool:
    with urllib.request.urlopen(f"http://{address}/ready", timeout=5) as response:
        return bool(response.status == 200)


async def test_each_connection_is_served_and_no_process_outlives_a_killed_parent(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    with serving(tiny_model("llama"), tmp_path, "--router-processes", "2") as served:
        addresses = await asyncio.to_thread(served.addresses)
        parent, address = served.process.pid, addresses["grpc"]
        assert all(answers(address) for _ in range(20))
        assert all(is_ready(addresses["http"]) for _ in range(5))
        routers = listeners(parent, address)
        assert len(routers) == 2
        victim = min(routers)
        of_victim = listening_sockets(address) & sockets_of(victim)
        os.kill(victim, signal.SIGKILL)
        # Until the kernel has closed its sockets, new connections can still reach the killed process.
        await until(lambda: not of_victim & listening_sockets(address))
        with Client(address, timeout=30) as client:
            assert client.generate([5, 6, 7], max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
        await until(lambda: len(listeners(parent, address)) == 2)
        assert victim not in listeners(parent, address)
        await until(lambda: all(answers(address) for _ in range(20)))
        check_port_in_use(address)
        everyone = children_of(parent)
        served.process.kill()
        await until(partial(have_ended, everyone))
        with Client(address, timeout=2) as client, pytest.raises(QuireError):
            client.model_info()


def check_port_in_use(address: str) -> None:
    """Check that other routers, one process or several, say that they cannot have the port."""
    port = address.rpartition(":")[2]
    for number in ("1", "2"):
        command = [*QUIRE, "router", "--port", port, "--metrics-port", "0", "--router-processes", number]
        assert "in use" in run_command(*command, status=1).stderr


def listeners(parent: int, address: str) -> set[int]:
    """Return the children of a process that listen at an address."""
    listening = listening_sockets(address)
    return {pid for pid in children_of(parent) if listening & sockets_of(pid)}


def listening_sockets(address: str) -> set[str]:
    """Return the inodes of the sockets that listen at an address."""
    port = int(address.rpartition(":")[2])
    found = set()
    # gRPC listens at IPv4 addresses through IPv6 sockets.
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def sockets_of(pid: int) -> set[str]:
    """Return the inodes of a process's sockets."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found
