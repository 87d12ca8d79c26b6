"""`quire rank`: who joins a worker, and what its ends and failures look like from both sides."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import trustme

from quire.models.random_model import make_random_model
from quire.services.server.tls import CLUSTER_NAME
from quire.services.worker.config import WorkerConfig

PROGRAM = "import sys; from quire.cli.main import main; sys.argv[0] = 'quire'; main()"
SECONDS = 180.0
"""A worker may have to compile its kernels first."""
SIZES: Any = {"intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
Process = subprocess.Popen[str]
Start = Callable[..., Process]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model("llama", tmp_path_factory.mktemp("llama"), **SIZES)


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Return what starts `quire` with arguments and variables; it is killed at the end, or when late."""
    with ExitStack() as stack:

        def start(*arguments: object, **variables: str) -> Process:
            command = [sys.executable, "-c", PROGRAM, *map(str, arguments), "--threads", "1"]
            environment = {**os.environ, "QUIRE_CLUSTER_SECRET": "known", **variables}
            process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
            timer = Timer(SECONDS, process.kill)
            timer.start()
            stack.callback(process.communicate)
            stack.callback(process.kill)
            stack.callback(timer.cancel)
            return process

        yield start


def worker(start: Start, address: str, *arguments: object, **variables: str) -> Process:
    options = ("--tensor-parallel-size", 2, "--rank-address", address)
    return start("decode", *options, *arguments, **variables)


def await_event(process: Process, event: str) -> list[str]:
    """Read a process's log up to an event, and return the lines."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if f"event={event} " in line:
            return lines
    raise AssertionError("".join(lines))


def log_of(process: Process) -> str:
    """Wait until a process has ended, and return the rest of its log."""
    return process.communicate(timeout=SECONDS)[1]


def test_a_worker_and_its_rank_serve_and_end_together(start: Start, address: str, model: Path) -> None:
    first, rank = worker(start, address, model), start("rank", address)
    await_event(rank, "rank_ready")
    [own_address] = re.findall("address=([^ ]*)", await_event(first, "worker_ready")[-1])
    # Once the worker answers, SIGTERM drains it.
    subprocess.run([sys.executable, "-c", PROGRAM, "health", own_address], check=True, timeout=SECONDS)
    first.terminate()
    assert (first.wait(SECONDS), rank.wait(SECONDS)) == (0, 0)
    assert "event=rank_ended" in log_of(rank)


def test_a_rank_of_another_cluster_is_refused(start: Start, address: str, model: Path) -> None:
    first = worker(start, address, model)
    await_event(first, "awaiting_ranks")
    stranger = start("rank", address, QUIRE_CLUSTER_SECRET="other")
    assert stranger.wait(SECONDS) == 1
    assert "do both have the same QUIRE_CLUSTER_SECRET and certificates?" in log_of(stranger)
    await_event(first, "rank_refused")
    # The worker still waits, and SIGTERM ends it.
    first.terminate()
    assert first.wait(SECONDS) == 128 + signal.SIGTERM


def test_ranks_with_certificates(start: Start, address: str, model: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    certificate = authority.issue_cert(CLUSTER_NAME)
    (tmp_path / "cert.pem").write_bytes(b"".join(each.bytes() for each in certificate.cert_chain_pems))
    (tmp_path / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    issued = {
        "QUIRE_CLUSTER_CERT": str(tmp_path / "cert.pem"),
        "QUIRE_CLUSTER_KEY": str(tmp_path / "key.pem"),
        "QUIRE_CLUSTER_CA": str(tmp_path / "ca.pem"),
    }
    first, rank = worker(start, address, model, **issued), start("rank", address, **issued)
    await_event(rank, "rank_ready")
    await_event(first, "worker_ready")


@pytest.mark.parametrize("victim", ["worker", "rank"])
def test_who_loads_ends_when_the_other_fails(start: Start, address: str, model: Path, victim: str) -> None:
    first, rank = worker(start, address, model), start("rank", address)
    await_event(first, "ranks_joined")
    if victim == "worker":
        first.kill()
        assert rank.wait(SECONDS) == 1
        assert f"this rank of the worker at {address} has ended" in log_of(rank)
        return
    rank.kill()
    assert first.wait(SECONDS) == 1
    assert "error: the worker did not start: the rank at 127.0.0.1" in log_of(first)


def test_a_rank_waits_for_its_worker_and_may_be_told_to_end(start: Start, address: str) -> None:
    rank = start("rank", address)
    await_event(rank, "awaiting_worker")
    rank.terminate()
    assert rank.wait(SECONDS) == 128 + signal.SIGTERM


def test_a_rank_that_left_before_the_start_is_not_counted(start: Start, address: str, model: Path) -> None:
    options = ("--tensor-parallel-size", 3, "--rank-address", address)
    first, early = start("decode", model, *options), start("rank", address)
    await_event(early, "rank_joined")
    early.kill()
    await_event(first, "rank_left")
    others = [start("rank", address) for _ in range(2)]
    for each in others:
        await_event(each, "rank_ready")
    await_event(first, "worker_ready")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rank_address": "127.0.0.1:7100"}, "--rank-address needs --tensor-parallel-size"),
        ({"rank_address": "7100", "tensor_parallel_size": 2}, "--rank-address must be host:port"),
        (
            {"rank_address": "127.0.0.1:7100", "tensor_parallel_size": 2, "transport": "shared"},
            "--transport shared needs all of a block in this machine's memory",
        ),
        (
            {"rank_address": "0.0.0.0:7100", "tensor_parallel_size": 2},
            "strangers can join as ranks at 0.0.0.0:7100",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WorkerConfig(role="decode", **settings)
