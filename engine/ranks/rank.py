"""The process of a rank other than 0: it loads its part of the model and runs the steps that rank 0 sends.

It has no scheduler and no sampler. It ends when rank 0 ends, or after any exception.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from threading import Thread

import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.kv_cache.shared_memory import map_shared
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.collectives import Collectives, RanksError, SharedMemory
from quire.engine.ranks.messages import HEADER_BYTES, Header, Kind, read_step
from quire.engine.ranks.rank_adapters import RankAdapters
from quire.engine.ranks.settings import RankSettings
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.weights.loader import LoadedModel, load_model
from quire.settings.setting import SettingError

_CPU = torch.device("cpu")


def main() -> None:
    """Run a rank; its settings are the only argument."""
    # Ctrl-C goes to all processes of a terminal, and a service manager's SIGTERM to all processes of a
    # service. Only rank 0 may react to them.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    settings = RankSettings.of(sys.argv[1])
    Thread(target=_end_with_rank_0, args=(settings.life,), daemon=True).start()
    torch.set_num_threads(settings.num_threads)
    memory = SharedMemory(settings.sizes, settings.memory)
    collectives = Collectives(memory, settings.rank)
    try:
        model = load_model(
            settings.model, settings.dtype, _CPU, settings.weight_dtype, settings.arithmetic, collectives
        )
        _serve(settings, model, collectives)
    except (OSError, RanksError, SettingError, UnsupportedModelError):
        # Rank 0 reports it: it fails with the same model in the same way, or knows which rank has failed.
        sys.exit(1)


def _end_with_rank_0(life: int) -> None:
    """Wait until the pipe closes. Then end the process, even if one of its threads waits for other ranks."""
    os.read(life, 1)
    os._exit(1)


def _serve(settings: RankSettings, model: LoadedModel, collectives: Collectives) -> None:
    """Execute the messages of rank 0 until the socket closes."""
    runner: ModelRunner | None = None
    control = socket.socket(fileno=settings.control)
    adapters = RankAdapters(model, control)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, HEADER_BYTES, 1)
        if not data:
            return
        header = Header.of(data)
        if header.kind == Kind.MAP_POOL:
            runner = _make_runner(settings, model)
            collectives.meet()
        elif header.kind == Kind.LOAD_ADAPTER:
            adapters.load(header.numbers[0], descriptors[0])
        elif header.kind == Kind.DROP_ADAPTER:
            adapters.drop(header.numbers[0])
        else:
            assert runner is not None
            step = read_step(collectives.memory, header, runner.memory.shape.num_frames)
            if step.adapters is not None:
                step = step._replace(adapters=adapters.own(step.adapters))
            runner.forward(step)


def _make_runner(settings: RankSettings, model: LoadedModel) -> ModelRunner:
    shape = model.kv_shape(settings.block_size, settings.kv_cache_dtype)
    shared = map_shared(settings.pool)
    num_blocks = len(shared.bytes) // shape.block_bytes
    return ModelRunner(model, KvMemory(shape, num_blocks, _CPU, shared=shared, own_heads=model.own_kv_heads))


if __name__ == "__main__":
    main()
