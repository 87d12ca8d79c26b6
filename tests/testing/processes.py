"""Processes that tests start and watch: ``quire serve``, workers that a script changes, ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.testing.forked import Forked

QUIRE = [sys.executable, "-c", "from quire.cli.main import main; main()"]
"""The command, as containers run it."""
WAIT_SECONDS = 240.0
SLOW_STEPS = """
import threading, time
forward, may_step = ModelRunner.forward, threading.Event()
may_step.set()

def slow(self, arguments):
    may_step.wait()
    time.sleep(prompt_seconds if len(arguments.input_ids) >= prompt_length else 0.01)
    return forward(self, arguments)

ModelRunner.forward = slow
"""
"""The beginning of a program for ``scripted_workers``: long prompts take long, and steps can be stopped."""
_ADDRESSES = {"grpc": r"serves .* at (\S+) \(gRPC", "http": r"http://(\S+)/v1", "admin": r"  admin +(\S+)"}
_WORKER = """
import json, sys
from quire.engine.runner.model_runner import ModelRunner
from quire.services.worker.config import WorkerConfig
from quire.services.worker_process import run_worker

settings = {"role": "decode", "model": sys.argv[1], "dtype": "float32", "num_blocks": 512}
settings["log_level"] = "error"

def begin():
    pass

PROGRAM

def on_ready(running):
    begin()
    print(json.dumps([running.address, running.metrics_port]), flush=True)

run_worker(WorkerConfig(**settings), on_ready)
"""


def have_ended(process_ids: Iterable[int]) -> bool:
    """Return whether no process exists any more but as a zombie."""

    def has_ended(process_id: int) -> bool:
        try:
            return Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2][0] in "ZX"
        except OSError:
            return True

    return all(map(has_ended, process_ids))


def children_of(process_id: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started."""
    return [each.pid for each in psutil.Process(process_id).children(recursive=True)]


@contextmanager
def worker_process(
    model: Path, redis_url: str, *settings: str, program: str = QUIRE[-1], role: str = "decode"
) -> Iterator[Forked]:
    """Run a worker in a process of its own."""
    common = ["--dtype", "float32", "--num-blocks", "1024", "--log-level", "error"]
    with closing(Forked(program, [role, model, "--redis-url", redis_url, *common, *settings])) as process:
        yield process


@dataclass(frozen=True)
class ScriptedWorker:
    """A decode worker that a script changes."""

    process: Forked
    address: str
    metrics_port: int


@contextmanager
def scripted_workers(
    program: str, model: Path, *arguments: object, count: int = 1
) -> Iterator[list[ScriptedWorker]]:
    """Run decode workers; each one executes a program before it starts.

    It may change ``ModelRunner`` and the ``settings`` of the worker, and define ``begin()``, which is called
    when the worker is ready. ``sys.argv`` has the arguments from index 2.
    """
    source = _WORKER.replace("PROGRAM", program)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(closing(Forked(source, (model, *arguments), has_pipes=True)))
            for _ in range(count)
        ]
        yield [ScriptedWorker(each, *json.loads(each.stdout.readline())) for each in processes]


class Served:
    """A running ``quire serve``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self, part: str) -> str:
        """Return what it says on stderr up to the next line that holds a text."""
        assert self.process.stderr is not None
        late = threading.Timer(WAIT_SECONDS, self.process.kill)
        late.start()
        said = ""
        for line in self.process.stderr:
            said += line
            if part in line:
                late.cancel()
                return said
        raise AssertionError(f"it ended without saying {part!r}: {said}")

    def addresses(self) -> dict[str, str]:
        """Wait until it serves; return its addresses of "grpc", "http" and "admin"."""
        banner = self.line("  redis ")
        found = {name: re.search(pattern, banner) for name, pattern in _ADDRESSES.items()}
        return {name: match[1] for name, match in found.items() if match}

    def end(self) -> tuple[int, str]:
        """Wait until it has ended; return its status and the rest of stderr."""
        _, rest = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, rest


@contextmanager
def serving(model: Path, folder: Path, *settings: str) -> Iterator[Served]:
    """Start ``quire serve`` in a process group of its own, as a script does that runs it in the background.

    ``folder`` gets its temporary files.
    """
    command = ["env", "--ignore-signal=INT", *QUIRE, "serve", str(model), *settings]
    common = ["--dtype", "float32", "--num-blocks", "2048", "--port", "0", "--http-port", "0"]
    with subprocess.Popen(
        [*command, *common],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        try:
            yield Served(process)
        finally:
            process.kill()
