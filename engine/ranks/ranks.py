"""Starts and ends the processes of the ranks other than 0, in the process of rank 0."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import torch

from quire.engine.config import EngineConfig
from quire.engine.kv_cache import shared_memory
from quire.engine.model.collectives import Collectives, SharedMemory
from quire.engine.ranks.messages import Header, Kind
from quire.engine.ranks.rank_failure import RankFailure
from quire.engine.ranks.settings import RankSettings, check_device, shared_sizes

_END_SECONDS = 2.0
"""Seconds after which a rank that does not end by itself is killed."""


class Ranks:
    """Rank 0's side of a group of ranks. If any rank ends, stops or hangs, the whole group fails.

    Args:
        config: the settings of the engine.
        num_ranks: number of ranks, with rank 0.

    Attributes:
        collectives: the collectives of rank 0. Their errors say why the group has failed.
        failure: gets the reason when the group fails.

    Raises:
        OSError: a process cannot be started.
    """

    def __init__(self, config: EngineConfig, num_ranks: int) -> None:
        self._controls: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
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
                arithmetic=config.arithmetic,
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
        self._failure = RankFailure(self._processes, self.collectives)
        self.failure = self._failure.reason

    def _start(self, settings: RankSettings, resources: ExitStack) -> None:
        """Start the processes.

        ``resources`` gets the ends of their pipes; a process ends when its pipe is closed.
        """
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

    def share_pool(self, num_bytes: int) -> shared_memory.SharedMemory:
        """Return memory for the KV blocks, which all ranks have mapped.

        Later mappings of it are read-only. Call this once, after rank 0 has loaded its part of the model.

        Raises:
            RanksError: a rank has failed.
        """
        os.ftruncate(self._pool, num_bytes)
        memory = shared_memory.map_shared(self._pool)
        self.send(Header(Kind.MAP_POOL))
        self.collectives.meet()
        shared_memory.seal_shared(self._pool)
        return memory

    def send(self, header: Header) -> None:
        """Send a message to all other ranks. Its tensors must be in shared memory already.

        Raises:
            RanksError: a rank has failed.
        """
        self.collectives.check()
        for control in self._controls:
            try:
                os.write(control, header.to_bytes())
            except BrokenPipeError:
                self._failure.end_ranks("a rank has closed its pipe")
                self.collectives.check()

    def expect_steps(self) -> None:
        """Start to enforce the time limit of a step. Call this after the first step."""
        self._failure.expect_steps()

    def close(self) -> None:
        """End all ranks and wait until they have ended; calling this again does nothing."""
        self._failure.close()
        self._memory.break_off()
        self._resources.close()

    def _await_ends(self) -> None:
        """Wait until all processes have ended, and kill those that do not end.

        Their pipes are closed already.
        """
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_ranks(config: EngineConfig, device: torch.device) -> Ranks | None:
    """Start the other processes that a model is divided among; return None if there are no others.

    Raises:
        SettingError: ranks do not work on the device.
        OSError: a process cannot be started.
    """
    if config.tensor_parallel_size == 1:
        return None
    check_device(config, device)
    return Ranks(config, config.tensor_parallel_size)


def _start(settings: RankSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quire.engine.ranks.rank", settings.to_json()],
        stdin=subprocess.DEVNULL,
        pass_fds=(settings.memory, settings.pool, settings.control, settings.life),
    )
