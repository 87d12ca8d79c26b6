"""The ranks on the machine of rank 0, as rank 0 sees them: it starts, watches and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Event, Thread

import torch

from quire.engine import shared_memory
from quire.engine.config import EngineConfig
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.parallel.collectives import Collectives, SharedMemory
from quire.engine.parallel.local_settings import RankSettings
from quire.engine.parallel.messages import Header, Kind, step_header, write_step
from quire.engine.parallel.rank_watch import RankWatch
from quire.engine.parallel.ranks import LOAD_SECONDS, STEP_SECONDS, Ranks, check_device
from quire.engine.parallel.shared_sizes import shared_sizes
from quire.engine.step_tensors import StepTensors
from quire.kvindex.kv_layout import KvShape

_POLL_SECONDS = 0.05
_END_SECONDS = 2.0
"""How long a rank has to end by itself."""


class LocalRanks(Ranks):
    """Ranks that share memory with rank 0.

    Args:
        config: the settings of the engine.
        num_ranks: number of ranks, with rank 0.

    Raises:
        OSError: a process cannot be started.
    """

    collectives: Collectives

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        self.failure: Future[str] = Future()
        self._limit = LOAD_SECONDS
        self._controls: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._is_closed = Event()
        num_threads = max(1, torch.get_num_threads() // num_ranks)
        with ExitStack() as resources:
            self._memory = SharedMemory(shared_sizes(config, num_ranks))
            resources.callback(os.close, self._memory.descriptor)
            self._pool = shared_memory.create_shared()
            resources.callback(os.close, self._pool)
            settings = RankSettings(
                rank=0,
                model=config.model_path,
                dtype=config.dtype,
                weight_dtype=config.weight_dtype,
                block_size=config.block_size,
                kv_cache_dtype=config.kv_cache_dtype,
                num_threads=num_threads,
                sizes=self._memory.sizes,
                memory=self._memory.descriptor,
                pool=self._pool,
                control=-1,
                life=-1,
            )
            resources.callback(self._await_ends)
            self._start(settings, resources)
            self._resources = resources.pop_all()
        torch.set_num_threads(num_threads)
        self.collectives = Collectives(self._memory, 0)
        self._watcher = Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _start(self, settings: RankSettings, resources: ExitStack) -> None:
        """Start the processes; ``resources`` gets the ends of their pipes, and closing these ends them."""
        with ExitStack() as theirs:
            life, own_end = os.pipe()
            theirs.callback(os.close, life)
            resources.callback(os.close, own_end)
            for rank in range(1, settings.sizes.num_ranks):
                control, own_end = os.pipe()
                theirs.callback(os.close, control)
                resources.callback(os.close, own_end)
                self._controls.append(own_end)
                self._processes.append(_start(replace(settings, rank=rank, control=control, life=life)))

    @property
    def process_ids(self) -> list[int]:
        """The processes of the ranks from 1."""
        return [each.pid for each in self._processes]

    def allocate_pool(self, model: LoadedModel, shape: KvShape, num_blocks: int) -> KvMemory:
        """See ``Ranks``. All ranks map the blocks, and from then on other processes can only read them."""
        os.ftruncate(self._pool, num_blocks * shape.block_bytes)
        memory = shared_memory.map_shared(self._pool)
        self.send(Header(Kind.MAP_POOL))
        self.collectives.meet()
        shared_memory.seal_shared(self._pool)
        return KvMemory(shape, num_blocks, torch.device("cpu"), shared=memory, own_heads=model.own_kv_heads)

    def send_step(self, step: StepTensors) -> None:
        """See ``Ranks``. The tensors lie in shared memory until all ranks have met after the step."""
        header = step_header(step, self._memory.sizes.max_rows)
        write_step(self._memory.message, step)
        self.send(header)

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
        """See ``Ranks``."""
        self._limit = STEP_SECONDS

    def close(self) -> None:
        """See ``Ranks``. It waits until the processes have ended."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._watcher.join()
        self._memory.break_off()
        self._resources.close()

    def _await_ends(self) -> None:
        """Wait until all processes have ended, whose pipes are closed; kill those that do not end."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self) -> None:
        """Fail the group when something is wrong with a rank."""
        watch = RankWatch(self._processes, self._memory)
        while not self._is_closed.wait(_POLL_SECONDS):
            problem = watch.observe(_POLL_SECONDS, self._limit)
            if problem is not None:
                self._fail(problem)
                return

    def _fail(self, problem: str) -> None:
        """Let rank 0 stop waiting, and end all other ranks, which may hang."""
        self.collectives.failure = self.collectives.failure or problem
        self._memory.break_off()
        for process in self._processes:
            process.kill()
        with suppress(InvalidStateError):  # it has failed before
            self.failure.set_result(problem)


def start_local_ranks(config: EngineConfig, device: torch.device) -> LocalRanks | None:
    """Start the processes that a model is divided among; return None if there is only this one.

    Raises:
        SettingError: ranks do not work on the device.
        OSError: a process cannot be started.
    """
    if config.tensor_parallel_size == 1:
        return None
    check_device(config, device)
    return LocalRanks(config, config.tensor_parallel_size)


def _start(settings: RankSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quire.engine.parallel.local_rank", settings.to_json()],
        stdin=subprocess.DEVNULL,
        pass_fds=(settings.memory, settings.pool, settings.control, settings.life),
    )
