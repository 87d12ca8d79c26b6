"""The processes of the ranks other than 0, as rank 0 sees them: it starts, watches and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from threading import Event, Thread

import torch

from quire.engine.config import EngineConfig
from quire.engine.parallel.collectives import Collectives, SharedMemory
from quire.engine.parallel.messages import Header
from quire.engine.parallel.settings import RankSettings, shared_sizes
from quire.kernels.cpu.exchange import LINE

_LOAD_SECONDS = 600.0
"""How long rank 0 waits for another rank until all have loaded: one may compile kernels, or read slowly."""
_STEP_SECONDS = 20.0
"""How long rank 0 waits for another rank in a step; their shares of the work are equal."""
_POLL_SECONDS = 0.05
_END_SECONDS = 2.0
"""How long a rank has to end by itself."""


class Ranks:
    """Rank 0's side of a group of ranks. If any rank ends or hangs, the whole group fails.

    Args:
        config: the settings of the engine.
        num_ranks: number of ranks, with rank 0.

    Attributes:
        collectives: those of rank 0, whose errors say why the group has failed.
    """

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        num_threads = max(1, torch.get_num_threads() // num_ranks)
        torch.set_num_threads(num_threads)
        self._memory = SharedMemory(shared_sizes(config, num_ranks))
        self.collectives = Collectives(self._memory, 0)
        self._limit = _LOAD_SECONDS
        life, self._life = os.pipe()
        settings = RankSettings(
            rank=0,
            model=config.model_path,
            dtype=config.dtype,
            weight_dtype=config.weight_dtype,
            block_size=config.block_size,
            num_threads=num_threads,
            sizes=self._memory.sizes,
            memory=self._memory.descriptor,
            control=-1,
            life=life,
        )
        self._controls: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, num_ranks):
            control, ours = os.pipe()
            self._controls.append(ours)
            self._processes.append(_start(replace(settings, rank=rank, control=control)))
            os.close(control)
        os.close(life)
        self._is_closed = Event()
        self._watcher = Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    @property
    def process_ids(self) -> list[int]:
        """The processes of the ranks from 1."""
        return [each.pid for each in self._processes]

    def send(self, header: Header) -> None:
        """Send a message to all ranks; its tensors are in shared memory.

        Raises:
            RanksError: a rank has failed.
        """
        self.collectives.check()
        for control in self._controls:
            try:
                os.write(control, header.to_bytes())
            except BrokenPipeError:
                self._fail("a rank has closed its pipe")
                self.collectives.check()

    def expect_steps(self) -> None:
        """From now on, let the group fail if a rank is late in a step; call this when all have loaded."""
        self._limit = _STEP_SECONDS

    def close(self) -> None:
        """End all ranks and wait until they have ended; calling this again does nothing."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._watcher.join()
        self._memory.break_off()
        for descriptor in (*self._controls, self._life):
            os.close(descriptor)
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.close(self._memory.descriptor)

    def _watch(self) -> None:
        """Fail the group when a rank ends, or when rank 0 has waited too long for it."""
        slowest, since = 0, time.monotonic()
        while not self._is_closed.wait(_POLL_SECONDS):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None:
                    self._fail(f"rank {rank} has ended with code {process.returncode}")
                    return
            rounds = self._memory.counters[:: LINE // 8][: len(self._processes) + 1].tolist()
            if min(rounds) != slowest or rounds[0] == slowest:
                slowest, since = min(rounds), time.monotonic()
            elif time.monotonic() - since > self._limit:
                self._fail(f"rank {rounds.index(slowest)} has not answered for {self._limit:.0f} s")
                return

    def _fail(self, problem: str) -> None:
        """Let rank 0 stop waiting, and end all other ranks, which may hang."""
        self.collectives.failure = self.collectives.failure or problem
        self._memory.break_off()
        for process in self._processes:
            process.kill()


def _start(settings: RankSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quire.engine.parallel.rank", settings.to_json()],
        stdin=subprocess.DEVNULL,
        pass_fds=(settings.memory, settings.control, settings.life),
    )
