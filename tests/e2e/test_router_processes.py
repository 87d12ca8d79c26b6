"""Several router processes on the same ports: each serves, is started again, and none outlives its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from quire.client import Client, QuireError
from quire.protos import inference_pb2 as pb
from quire.protos.inference_pb2_grpc import GenerationServiceStub
from tests.testing.stacks import QUIRE

WAIT_SECONDS = 90.0
LISTENING = "0A"


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.1)
    raise AssertionError(f"not within {WAIT_SECONDS} s: {what}")


def answers(address: str) -> bool:
    """Return whether a new connection gets an answer."""
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            GenerationServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return True


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def serve(tiny_model: Callable[[str], Path]) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Run ``quire serve`` with two router processes; yield it with its gRPC and HTTP addresses."""
    settings = ["--dtype", "float32", "--num-blocks", "512", "--port", "0", "--http-port", "0"]
    command = [*QUIRE, "serve", str(tiny_model("llama")), *settings, "--router-processes", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        found: dict[str, str] = {}
        for line in process.stderr:
            if match := re.search(r"serves .* at (\S+) \(gRPC", line):
                found["grpc"] = match[1]
            if match := re.search(r"http://(\S+)/v1", line):
                found["http"] = match[1]
            if "redis " in line:
                break
        try:
            yield process, found["grpc"], found["http"]
        finally:
            process.kill()


def test_every_connection_is_served_also_after_a_process_was_killed(serve: Any) -> None:
    process, address, http = serve
    everyone = children_of(process.pid)
    assert all(answers(address) for _ in range(20))
    for _ in range(5):
        with urllib.request.urlopen(f"http://{http}/ready", timeout=5) as response:
            assert response.status == 200
    routers = listeners(process.pid, address)
    assert len(routers) == 2
    victim = min(routers)
    os.kill(victim, signal.SIGKILL)
    with Client(address, timeout=30) as client:
        assert client.generate([5, 6, 7], max_tokens=4, ignore_eos=True).usage.completion_tokens == 4
    until(lambda: len(listeners(process.pid, address)) == 2, "the router is started again")
    assert victim not in listeners(process.pid, address)
    until(lambda: all(answers(address) for _ in range(20)), "all connections are served")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    until(lambda: not any(map(is_alive, everyone)), "all processes have ended")


def test_a_port_in_use_is_reported_and_no_process_outlives_a_killed_parent(serve: Any) -> None:
    process, address, _ = serve
    port = address.rpartition(":")[2]
    for number in ("1", "2"):
        command = [*QUIRE, "router", "--port", port, "--metrics-port", "0", "--router-processes", number]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert "in use" in done.stderr
    everyone = children_of(process.pid)
    process.kill()
    process.wait()
    until(lambda: not any(map(is_alive, everyone)), "all processes have ended")
    with Client(address, timeout=2) as client, pytest.raises(QuireError):
        client.model_info()


def listeners(parent: int, address: str) -> set[int]:
    """Return the children of a process that listen at an address."""
    port = int(address.rpartition(":")[2])
    sockets = set()
    # gRPC listens at IPv4 addresses through IPv6 sockets.
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                sockets.add(fields[9])
    return {pid for pid in children_of(parent) if sockets & _sockets(pid)}


def _sockets(pid: int) -> set[str]:
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
