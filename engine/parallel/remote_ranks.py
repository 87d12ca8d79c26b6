"""Ranks on other machines, as rank 0 sees them.

Each has two connections to rank 0: one for steps and their sums, the other for blocks and signs of life,
which do not wait for a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from threading import Event, Thread
from typing import NamedTuple

import numpy as np

from quire.engine.config import EngineConfig
from quire.engine.model_loader import LoadedModel
from quire.engine.parallel.collectives import RanksError, SharedMemory
from quire.engine.parallel.divided_memory import BlockLinks, DividedMemory
from quire.engine.parallel.link import FrameKind, Link
from quire.engine.parallel.link_collectives import LinkCollectives
from quire.engine.parallel.messages import step_bytes, step_header, write_step
from quire.engine.parallel.ranks import LOAD_SECONDS, STEP_SECONDS, Ranks
from quire.engine.parallel.remote_settings import LoadedPart, RemoteSettings, own_version
from quire.engine.parallel.shared_sizes import shared_sizes
from quire.engine.step_tensors import StepTensors
from quire.kvindex.kv_layout import KvShape

_ANSWER_SECONDS = 5.0
"""How long rank 0 waits for an answer about blocks, or for a sign of life."""
_LOADING_ANSWER_SECONDS = 60.0
"""The same while models are loaded and kernels are compiled, which may hold up a rank's other threads."""
_PING_SECONDS = 0.5

LEAVING = b"leaving"
"""Answer to a ping of a rank that was told to end."""


class RankLinks(NamedTuple):
    """The two connections to a rank."""

    steps: Link
    blocks: Link


class RemoteRanks(Ranks):
    """Ranks on other machines.

    Args:
        config: the settings of the engine.
        links: to the other ranks; the first becomes rank 1.
        on_leaving: called once, in a thread of its own, when a rank was told to end: the worker should too.

    Raises:
        RanksError: a rank is gone.
    """

    collectives: LinkCollectives

    def __init__(
        self, config: EngineConfig, links: Sequence[RankLinks], on_leaving: Callable[[], None]
    ) -> None:
        self.failure: Future[str] = Future()
        self._links = links
        self._on_leaving = on_leaving
        self._steps = [each.steps for each in links]
        self._blocks = BlockLinks([each.blocks for each in links])
        sizes = shared_sizes(config, len(links) + 1)
        self._memory = SharedMemory(sizes)
        self.collectives = LinkCollectives(self._memory, self._steps, 0)
        self._is_closed = Event()
        for rank, each in enumerate(links, 1):
            each.steps.set_limit(LOAD_SECONDS)
            each.blocks.set_limit(_LOADING_ANSWER_SECONDS)
            settings = RemoteSettings(
                rank=rank,
                sizes=sizes,
                quire_version=own_version(),
                model=config.model,
                dtype=config.dtype,
                block_size=config.block_size,
                kv_cache_dtype=config.kv_cache_dtype,
            )
            each.steps.send(FrameKind.SETTINGS, settings.to_json())
        self._watcher = Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def allocate_pool(self, model: LoadedModel, shape: KvShape, num_blocks: int) -> DividedMemory:
        """See ``Ranks``. Each rank allocates the blocks of its own heads only.

        Raises:
            RanksError: a rank has failed, or its machine has another model.
        """
        heads = [model.own_kv_heads or range(shape.num_kv_heads)]
        for link in self._steps:
            part = LoadedPart.of(link.receive(FrameKind.LOADED)[1])
            if part.digest != model.digest:
                raise RanksError(
                    f"{link.peer} has loaded another model than this worker: give both the same files"
                )
            heads.append(part.heads)
        for link in self._steps:
            link.send(FrameKind.POOL, np.int64(num_blocks).tobytes())
        for link in self._steps:
            link.receive(FrameKind.DONE)
        return DividedMemory(shape, num_blocks, heads, self._blocks)

    def send_step(self, step: StepTensors) -> None:
        """See ``Ranks``."""
        header = step_header(step, self._memory.sizes.max_rows)
        message = np.empty(step_bytes(step), np.uint8)
        write_step(message, step)
        self.collectives.send(FrameKind.STEP, header.to_bytes(), message.data)

    def expect_steps(self) -> None:
        """See ``Ranks``."""
        for each in self._links:
            each.steps.set_limit(STEP_SECONDS)
            each.blocks.set_limit(_ANSWER_SECONDS)

    def close(self) -> None:
        """See ``Ranks``. It does not wait for the processes, which are not this one's."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._watcher.join()
        for link in (link for each in self._links for link in each):
            with suppress(RanksError):
                link.send(FrameKind.END)
        self._close_links()
        os.close(self._memory.descriptor)

    def _watch(self) -> None:
        """Fail the group when a rank gives no sign of life, and tell when one was told to end."""
        pings = dict.fromkeys(range(1, len(self._links) + 1), (FrameKind.PING, ()))
        has_told = False
        while not self._is_closed.wait(_PING_SECONDS):
            try:
                answers = self._blocks.ask(pings)
            except RanksError as error:
                if not self._is_closed.is_set():
                    self._fail(str(error))
                return
            if LEAVING in answers.values() and not has_told:
                has_told = True
                self._on_leaving()

    def _fail(self, problem: str) -> None:
        """Let rank 0 stop waiting, and all other ranks end."""
        self.collectives.failure = self.collectives.failure or problem
        self._blocks.failure = self._blocks.failure or problem
        self._memory.break_off()
        self._close_links()
        with suppress(InvalidStateError):  # it has failed before
            self.failure.set_result(problem)

    def _close_links(self) -> None:
        for each in self._links:
            each.steps.close()
            each.blocks.close()
