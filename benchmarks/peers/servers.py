"""Starts servers of quire and vLLM, which run only during their turns."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from quire.benchmarks.peers.clients import CHECK_PROMPT, CHECK_TOKENS, MODEL, http_sender
from quire.benchmarks.peers.environments import environment_variables, interpreter, is_installed
from quire.benchmarks.peers.process_tree import ProcessTree
from quire.benchmarks.peers.processes import SideFailedError
from quire.benchmarks.peers.sides.compressed_checkpoint import checkpoint_for
from quire.benchmarks.peers.sides.protocol import Setup
from quire.cli.bench.summary import OK

START_SECONDS = 1200
"""Time limit of a start: vLLM compiles for minutes when it serves a model for the first time."""
END_SECONDS = 10
"""Time in which a server may end by itself before it is killed."""
TURN_SECONDS = 60
"""Time limit for a server's first answer after it was stopped."""
POLL_SECONDS = 0.1
BLOCK_SIZE = 16


class Ports(NamedTuple):
    """Local ports of a server; vLLM has no gRPC."""

    http: int
    grpc: int


class Server:
    """A server and all processes that it starts. The end of the ``with`` block ends them.

    They are stopped except while they start and within ``turn``.

    Args:
        command: the command that starts the server.
        environment: variables to add to this process's own.
        ports: where it will listen.
        log: file for all that it prints.
        ready_text: text that it prints when all of its processes have started; if empty, it has started when
            it answers.

    Raises:
        SideFailedError: it does not start here.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        ports: Ports,
        log: Path,
        ready_text: str = "",
    ) -> None:
        self.http_url = f"http://127.0.0.1:{ports.http}"
        self.grpc_address = f"127.0.0.1:{ports.grpc}"
        self._log = log
        self._ready_text = ready_text
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # In a separate session it gets no Ctrl-C: ``close`` ends it.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._tree = ProcessTree(self._process.pid)
        try:
            self._wait_until_ready()
            self._tree.stop()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Let the server run within the ``async with`` block, which begins once it answers a request.

        Raises:
            SideFailedError: it does not answer in time.
        """
        with self._tree.running():
            deadline = time.monotonic() + TURN_SECONDS
            async with http_sender(self.http_url) as send:
                # A router that was stopped assumes that its workers are lost until they report again.
                while (record := await send(CHECK_PROMPT, CHECK_TOKENS, time.perf_counter())).status != OK:
                    self._check(deadline, record.status)
                    await asyncio.sleep(POLL_SECONDS)
            yield

    def close(self) -> None:
        """End the server and all that it started, by SIGTERM if it obeys."""
        try:
            self._tree.resume()
            self._process.terminate()
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._tree.kill()
            self._process.wait()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urlopen(f"{self.http_url}/v1/models", timeout=POLL_SECONDS * 10):
                    if self._ready_text in self._log.read_text():
                        return
                problem = f"it has not printed {self._ready_text!r}"
            except (URLError, OSError) as error:
                problem = str(error)
            self._check(deadline, problem)
            time.sleep(POLL_SECONDS)

    def _check(self, deadline: float, problem: str) -> None:
        if self._process.poll() is not None:
            raise SideFailedError(f"its process ended: see {self._log}")
        if time.monotonic() > deadline:
            raise SideFailedError(f"it did not answer in time ({problem}): see {self._log}")


def quire_server(setup: Setup, log: Path, num_prefill: int, arguments: Sequence[str] = ()) -> Server:
    """Start ``quire serve`` with one decode worker; the workers divide the processors among them.

    Args:
        num_prefill: number of prefill workers. Without any, the decode worker computes the prompts.
        arguments: further arguments of ``quire serve``.
    """
    ports = free_ports()
    command = [sys.executable, "-P", "-c", "from quire.cli.main import main; main()", "serve", setup.model]
    options = {
        "dtype": setup.compute_dtype,
        "weight-dtype": setup.weight_dtype,
        "max-model-len": setup.max_model_len,
        "max-num-seqs": setup.max_num_seqs,
        "num-blocks": setup.max_num_seqs * -(-setup.max_model_len // BLOCK_SIZE),
        "served-model-name": MODEL,
        "prefill": num_prefill,
        "decode": 1,
        "port": ports.grpc,
        "http-port": ports.http,
        "admin-port": 0,
    }
    full = [*command, *_flags(options), *arguments]
    # The router answers before it knows all workers. If the stack is stopped at this time, its start fails.
    return Server(full, {"HF_HUB_OFFLINE": "1"}, ports, log, ready_text="quire serves")


def vllm_server(setup: Setup, folder: Path, log: Path, *, is_pair: bool = False) -> Server:
    """Start vLLM's OpenAI server; the folder holds its environment.

    Args:
        is_pair: whether one server computes prompts and another generates, with half of the cores each.

    Raises:
        SideFailedError: it is not installed, or does not start here.
    """
    if not is_installed("vllm", folder):
        raise SideFailedError("it is not installed: run python -m quire.benchmarks.peers --install first")
    try:
        model = checkpoint_for(setup)
    except ValueError as error:
        raise SideFailedError(str(error)) from None
    ports = free_ports()
    options = {
        "model": str(model),
        "dtype": setup.compute_dtype,
        "max-model-len": setup.max_model_len,
        "max-num-seqs": setup.max_num_seqs,
        "served-model-name": MODEL,
        "port": ports.http,
    }
    variables = environment_variables("vllm", folder, setup.threads)
    if is_pair:
        module = "quire.benchmarks.peers.sides.vllm_pair"
        options["cores"] = variables["VLLM_CPU_OMP_THREADS_BIND"]
    else:
        module = "vllm.entrypoints.openai.api_server"
        options["host"] = "127.0.0.1"
    command = [str(interpreter("vllm", folder)), "-P", "-m", module, *_flags(options)]
    return Server([*command, "--disable-uvicorn-access-log"], variables, ports, log)


def free_ports() -> Ports:
    """Return two free local ports."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return Ports(first.getsockname()[1], second.getsockname()[1])


def _flags(options: Mapping[str, object]) -> list[str]:
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]
