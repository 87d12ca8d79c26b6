"""A rank on another machine than rank 0, whose steps it runs.

It loads its part of the model. It has no scheduler and no sampler. Any failure ends it, and so does the end
of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread

import numpy as np
import torch
from transformers import AutoConfig

from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import load_model
from quire.engine.model_runner import ModelRunner
from quire.engine.parallel.collectives import RanksError, SharedMemory, SharedSizes
from quire.engine.parallel.head_parts import part_shape
from quire.engine.parallel.link import FrameKind, Link
from quire.engine.parallel.link_collectives import LinkCollectives
from quire.engine.parallel.messages import HEADER_BYTES, Header, read_step
from quire.engine.parallel.ranks import LOAD_SECONDS
from quire.engine.parallel.remote_ranks import LEAVING, RankLinks
from quire.engine.parallel.remote_settings import LoadedPart, RemoteSettings
from quire.models.bundled import demo_model_path
from quire.models.source import find_model

_CPU = torch.device("cpu")
_REQUESTS = FrameKind.PING, FrameKind.READ, FrameKind.WRITE, FrameKind.COPY
_SILENT_SECONDS = 30.0
"""How long rank 0 may send no request about blocks, not even a ping."""


def run_rank(
    links: RankLinks,
    model: str | None,
    is_leaving: Event,
    on_ready: Callable[[RemoteSettings], None],
) -> None:
    """Be a rank until rank 0 ends it.

    Args:
        links: the connections to rank 0.
        model: folder or hub id of the model; None means what rank 0 names.
        is_leaving: set when this process was told to end; rank 0 is told, and ends the group.
        on_ready: called when this rank can run steps.

    Raises:
        RanksError: rank 0 has failed.
        ValueError: this machine has another version of quire, or the model cannot be divided.
        OSError: the model cannot be read.
    """
    server = BlockServer(links, is_leaving)
    server.start()
    try:
        settings = RemoteSettings.of(links.steps.receive(FrameKind.SETTINGS)[1])
        settings = replace(settings, model=model or settings.model)
        runner = _prepare(links.steps, settings, server)
        on_ready(settings)
        _run_steps(links.steps, runner)
    except RanksError as error:
        raise RanksError(server.failure or str(error)) from error
    except Exception as error:
        _tell_failure(links.steps, f"{type(error).__name__}: {error}")
        raise
    finally:
        links.steps.close()
        links.blocks.close()
        # A thread that is still in torch's code when the interpreter ends would abort the process.
        server.join()


def _tell_failure(steps: Link, problem: str) -> None:
    """Send a problem to rank 0, and wait until it closes the links, since it may read only later."""
    with suppress(RanksError):
        steps.send(FrameKind.ERROR, problem.encode())
        steps.set_limit(LOAD_SECONDS)
        while True:
            steps.receive(*FrameKind)


def _prepare(steps: Link, settings: RemoteSettings, server: BlockServer) -> ModelRunner:
    """Load the model, tell rank 0 what was loaded, and allocate the blocks that it asks for."""
    path = settings.model or str(demo_model_path())
    _check_sizes(path, settings.sizes)
    collectives = LinkCollectives(SharedMemory(settings.sizes), [steps], settings.rank)
    model = load_model(path, settings.dtype, _CPU, collectives=collectives)
    shape = model.kv_shape(settings.block_size, settings.kv_cache_dtype)
    heads = model.own_kv_heads or range(shape.num_kv_heads)
    steps.send(FrameKind.LOADED, LoadedPart(model.digest, heads.start, heads.stop).to_json())
    num_blocks = int(np.frombuffer(steps.receive(FrameKind.POOL)[1], np.int64)[0])
    memory = KvMemory(part_shape(shape, heads), num_blocks, _CPU)
    server.memory = memory
    steps.send(FrameKind.DONE)
    return ModelRunner(model, memory)


def _check_sizes(path: str, sizes: SharedSizes) -> None:
    """Raise ValueError for a model that would not fit the memory for sums."""
    config = AutoConfig.from_pretrained(find_model(path)).get_text_config()
    if (config.hidden_size, config.vocab_size) != (sizes.hidden_size, sizes.vocab_size):
        raise ValueError(f"{path} is another model than the worker's: give both the same files")


def _run_steps(steps: Link, runner: ModelRunner) -> None:
    while True:
        kind, data = steps.receive(FrameKind.STEP, FrameKind.END)
        if kind is FrameKind.END:
            return
        message = np.frombuffer(data, np.uint8)
        header = Header.of(bytes(message[:HEADER_BYTES]))
        runner.forward(read_step(message[HEADER_BYTES:], header))


class BlockServer(Thread):
    """Answers what rank 0 asks about blocks, beside the steps, and ends the steps if rank 0 is gone.

    Attributes:
        memory: the blocks, once they are allocated.
        failure: why rank 0 is gone.
    """

    def __init__(self, links: RankLinks, is_leaving: Event) -> None:
        super().__init__(name="blocks", daemon=True)
        self._links = links
        self._is_leaving = is_leaving
        self.memory: KvMemory | None = None
        self.failure: str | None = None

    def run(self) -> None:
        link = self._links.blocks
        try:
            while True:
                kind, data = link.receive(*_REQUESTS, FrameKind.END)
                # Only the first ping may take long: rank 0 waits for all other ranks before.
                link.set_limit(_SILENT_SECONDS)
                if kind is FrameKind.END:
                    return
                link.send(FrameKind.DONE, self._answer(kind, data))
        except Exception as error:  # whatever it is, rank 0 must not wait
            self.failure = str(error)
            link.close()
            self._links.steps.close()

    def _answer(self, kind: FrameKind, data: bytearray) -> bytes:
        if kind is FrameKind.PING:
            return LEAVING if self._is_leaving.is_set() else b""
        assert self.memory is not None
        if kind is FrameKind.READ:
            return b"".join(self.memory.payload(each) for each in np.frombuffer(data, np.int64))
        if kind is FrameKind.COPY:
            ids = np.frombuffer(data, np.int64).tolist()
            self.memory.copy_within(list(zip(ids[::2], ids[1::2], strict=True)))
            return b""
        size = self.memory.shape.block_bytes
        num_blocks = len(data) // (8 + size)
        ids, payloads = np.frombuffer(data, np.int64, num_blocks), memoryview(data)[8 * num_blocks :]
        for index, block_id in enumerate(ids):
            self.memory.write(block_id, payloads[index * size : (index + 1) * size])
        return b""
