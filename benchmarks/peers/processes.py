"""Starts a side as a process and gives it requests."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from quire.benchmarks.peers.process_tree import ProcessTree
from quire.benchmarks.peers.sides.protocol import Setup
from quire.benchmarks.peers.workloads import Requests

SECONDS = 1200
"""Time limit of loading, and of each workload: a first run may compile for minutes."""


class SideFailedError(RuntimeError):
    """A side could not load its model or answer; the message is the reason."""


class Answer(NamedTuple):
    """The seconds that a side took for requests, and the tokens of each answer."""

    seconds: float
    tokens: list[list[int]]


class SideProcess:
    """A side's process and those that it starts. The end of the ``with`` block ends all of them.

    They are stopped except while they load and generate. Threads that spin for a while after their last
    work would otherwise slow down the next side.

    Args:
        command: the interpreter and the module; the setup becomes its last argument.
        environment: variables to add to this process's own.
        log: file for all that the side prints.

    Raises:
        SideFailedError: the side cannot run here.
    """

    def __init__(
        self, command: Sequence[str], setup: Setup, environment: Mapping[str, str], log: Path
    ) -> None:
        with log.open("wb") as stderr:
            # In a separate session it gets no Ctrl-C: ``close`` ends it with all processes that it started.
            self._process = subprocess.Popen(
                [*command, json.dumps(setup._asdict())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._tree = ProcessTree(self._process.pid)
        self._log = log
        try:
            loaded = self._read()
            self.version, self.arithmetic = str(loaded["version"]), str(loaded["arithmetic"])
            self._tree.stop()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def generate(self, requests: Requests) -> Answer:
        """Run requests; return when all answers are complete.

        Raises:
            SideFailedError: the process ended, reported an error, or took too long.
        """
        with self._tree.running():
            self._write(requests)
            answer = Answer(**self._read())
        lengths = [len(tokens) for tokens in answer.tokens]
        if lengths != requests.max_tokens:
            raise SideFailedError("its answers do not have the requested lengths")
        return answer

    def close(self) -> None:
        """End the process and all that it started."""
        self._tree.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _write(self, requests: Requests) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(requests._asdict()).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SideFailedError(f"its process ended: see {self._log}") from None

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], SECONDS)[0]:
            raise SideFailedError(f"no answer within {SECONDS} s: see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise SideFailedError(f"its process ended: see {self._log}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise SideFailedError(f"{message['error']} (see {self._log})")
        return message
