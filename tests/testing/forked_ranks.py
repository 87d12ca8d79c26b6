"""Ranks that are forked as ``forked`` does it, for tests of what they compute."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from quire.engine.ranks.settings import RankSettings
from quire.services.worker.config import RunningWorker, WorkerConfig
from quire.services.worker_process import run_worker
from tests.testing.forked import Forked, ForkedProcess

_RANK = """
import json, sys
from quire.engine.ranks.rank import main

settings = json.loads(sys.argv[1])
settings.update(zip(("memory", "pool", "control", "life"), [each.fileno() for each in inherited]))
sys.argv[1] = json.dumps(settings)
main()
"""


def forked_rank(settings: RankSettings) -> Forked:
    """Start the process of a rank other than 0, in place of ``quire.engine.ranks.ranks._start``."""
    return Forked(_RANK, [settings.to_json()], descriptors=_descriptors(settings))


def run_worker_with_forked_ranks(config: WorkerConfig, on_ready: Callable[[RunningWorker], None]) -> None:
    """Run a worker whose ranks are forked from it, in place of ``run_worker``.

    They are forked before the worker starts threads. Each worker would have to start the fork server of
    ``forked_rank``, which would import everything again.
    """
    ranks = [_WaitingRank() for _ in range(config.tensor_parallel_size - 1)]
    if ranks:
        from quire.engine.ranks import ranks as ranks_module

        ranks_module._start = lambda settings: ranks.pop().begin(settings)  # type: ignore[assignment, return-value]
    run_worker(config, on_ready)


class _WaitingRank(ForkedProcess):
    """A process that becomes a rank once it gets its settings; it ends with the process that forked it."""

    def __init__(self) -> None:
        self._socket, other_end = socket.socketpair()
        with other_end:
            context = multiprocessing.get_context("fork")
            super().__init__(context.Process(target=self._run, args=(other_end,), daemon=True))

    def begin(self, settings: RankSettings) -> _WaitingRank:
        with self._socket as sender:
            values = json.dumps([settings.to_json(), [*os.sched_getaffinity(0)]]).encode()
            socket.send_fds(sender, [values], _descriptors(settings))
        return self

    def _run(self, receiver: socket.socket) -> None:
        self._socket.close()
        values, descriptors, _, _ = socket.recv_fds(receiver, 1 << 16, 4)
        if values:
            from quire.engine.ranks.rank import main

            settings, processors = json.loads(values)
            os.sched_setaffinity(0, processors)
            memory, pool, control, life = descriptors
            own = replace(RankSettings.of(settings), memory=memory, pool=pool, control=control, life=life)
            sys.argv = ["rank", own.to_json()]
            main()


def _descriptors(settings: RankSettings) -> list[int]:
    return [settings.memory, settings.pool, settings.control, settings.life]
