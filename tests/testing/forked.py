"""Processes that are forked from one that has imported torch, transformers and Numba, as workers are.

Importing these takes 4.5 s of processor time. Ranks that start from scratch are tested in
``tests/services/worker/test_ranks_end.py``, and workers in ``tests/e2e/test_trust.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import MappingProxyType
from typing import IO

from quire.services.local.child_processes import fork_server
from quire.services.local.local_launcher import WORKER_MODULES

# The fork server has the environment of its own start, and holds signals back.
_BEGIN = """
import gc, os, signal, sys
from quire.rpc.server import STOP_SIGNALS

gc.freeze()
signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
os.environ.clear()
os.environ.update(environment)
for number, output in enumerate(outputs, 1):
    os.dup2(output.fileno(), number)
if outputs:
    sys.stdout = open(1, "w", closefd=False)  # what it was may have been a file, which can be seeked
sys.argv = ["-c", *arguments]
exec(program, {"__name__": "__main__", "inherited": inherited})
"""


class ForkedProcess:
    """A process of multiprocessing; its methods are those of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._process.start()
        self._asking = threading.Lock()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        # The first thread that asks after the end reads the status from a pipe.
        with self._asking:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class Forked(ForkedProcess):
    """A process that runs a program as ``python -c`` does.

    Args:
        program: the source text.
        arguments: what ``sys.argv`` has from index 1.
        environment: more variables than those of this process.
        descriptors: the program gets duplicates of them, in the list ``inherited`` of connections.
        has_pipes: whether ``stdout`` and ``stderr`` are pipes; a program must not fill them.
    """

    stdout: IO[str]
    stderr: IO[str]

    def __init__(
        self,
        program: str,
        arguments: Iterable[object] = (),
        *,
        environment: Mapping[str, str] = MappingProxyType({}),
        descriptors: Iterable[int] = (),
        has_pipes: bool = False,
    ) -> None:
        context = fork_server(WORKER_MODULES)
        pipes = [context.Pipe(duplex=False) for _ in range(2)] if has_pipes else []
        values = {
            "program": program,
            "arguments": [*map(str, arguments)],
            "environment": {**os.environ, **environment},
            "outputs": [sender for _, sender in pipes],
            "inherited": [Connection(os.dup(each)) for each in descriptors],
        }
        super().__init__(context.Process(target=exec, args=(_BEGIN, values)))
        for name, (receiver, sender) in zip(("stdout", "stderr"), pipes, strict=False):
            sender.close()
            setattr(self, name, os.fdopen(os.dup(receiver.fileno())))
            receiver.close()

    def close(self) -> None:
        """Kill the process, and close its pipes."""
        self.kill()
        self.wait()
        for each in (self.__dict__.get("stdout"), self.__dict__.get("stderr")):
            if each is not None:
                each.close()
