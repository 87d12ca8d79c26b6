"""Starts and ends the processes of the ranks other than 0, in the process of rank 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from weakref import finalize

import torch

from quire.engine.config import EngineConfig
from quire.engine.kv_cache import shared_memory
from quire.engine.model.collectives import Collectives, RanksError, SharedMemory
from quire.engine.ranks.messages import Header, Kind
from quire.engine.ranks.rank_adapters import PLACED, weights_file
from quire.engine.ranks.rank_failure import RankFailure
from quire.engine.ranks.settings import RankSettings, check_device, shared_sizes
from quire.engine.weights.adapters import Adapter, load_adapter, place_adapter, read_adapter
from quire.engine.weights.loader import LoadedModel

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
        self._controls: list[socket.socket] = []
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

        ``resources`` gets the ends of their sockets and pipes; a process ends when they are closed.
        """
        with ExitStack() as theirs:
            life, own_end = os.pipe()
            theirs.callback(os.close, life)
            resources.callback(os.close, own_end)
            for rank in range(1, settings.sizes.num_ranks):
                control, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                theirs.enter_context(control)
                self._controls.append(resources.enter_context(own))
                own_settings = replace(settings, rank=rank, control=control.fileno(), life=life)
                self._processes.append(_start(own_settings))

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

    def load_adapter(self, path: str, model: LoadedModel) -> Adapter:
        """Load an adapter on all ranks; see ``read_adapter``. One thread at a time may call this.

        The other ranks forget it when rank 0's own is freed.

        Args:
            model: rank 0's part of the model.

        Raises:
            OSError: a rank cannot place it, for example because it has no memory.
            RanksError: a rank has failed.
        """
        weights = read_adapter(path, model)
        adapter = place_adapter(weights, model)
        descriptor = weights_file(weights)
        try:
            self.send(Header(Kind.LOAD_ADAPTER, (adapter.address,)), (descriptor,))
        finally:
            os.close(descriptor)
        finalize(adapter, self._drop_adapter, adapter.address).atexit = False
        answers = [self._receive(control) for control in self._controls]
        if any(each != PLACED for each in answers):
            raise OSError("another rank cannot place it")
        return adapter

    def _drop_adapter(self, address: int) -> None:
        with suppress(RanksError):  # the ranks have ended, or are about to
            self.send(Header(Kind.DROP_ADAPTER, (address,)))

    def send(self, header: Header, descriptors: Sequence[int] = ()) -> None:
        """Send a message to all other ranks. Its tensors must be in shared memory already.

        Args:
            descriptors: descriptors of files that each rank gets its own of.

        Raises:
            RanksError: a rank has failed.
        """
        self.collectives.check()
        for control in self._controls:
            try:
                socket.send_fds(control, [header.to_bytes()], descriptors)
            except OSError:
                self._failure.end_ranks("a rank has closed its socket")
                self.collectives.check()

    def _receive(self, control: socket.socket) -> bytes:
        """Return a rank's answer; raise RanksError if it has ended."""
        answer = b""
        with suppress(ConnectionError):
            answer = control.recv(1)
        if not answer:
            self._failure.end_ranks("a rank has closed its socket")
            self.collectives.check()
        return answer

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

        Their sockets are closed already.
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


def load_adapter_on(ranks: Ranks | None, path: str, model: LoadedModel) -> Adapter:
    """Load an adapter on all ranks, or in this process if there are no others; see ``read_adapter``."""
    return load_adapter(path, model) if ranks is None else ranks.load_adapter(path, model)


def _start(settings: RankSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "quire.engine.ranks.rank", settings.to_json()],
        stdin=subprocess.DEVNULL,
        pass_fds=(settings.memory, settings.pool, settings.control, settings.life),
    )
