"""Starts a worker's engine: builds it with the tiers of its cache, warms it up, and runs it in its thread."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from prometheus_client import ProcessCollector

from quire.engine.engine import Engine, EngineParts
from quire.engine.engine_thread import EngineFailedError, EngineThread
from quire.engine.kv_cache.disk_cache import DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.decode_graphs import CudaCapture
from quire.engine.pool_memory import allocate_swap_space
from quire.engine.ranks.parallel_runner import ParallelRunner
from quire.engine.ranks.ranks import Ranks
from quire.engine.runner.lent_processors import LentProcessors
from quire.engine.runner.step_watch import StepWatch
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.schedule import StepKind
from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.speculators import make_speculator
from quire.sampling.params import SamplingParams
from quire.services.server.log import EventLogger
from quire.services.worker.config import WorkerConfig
from quire.services.worker.lifecycle.kv_events import Listeners
from quire.services.worker.lifecycle.start import Start
from quire.services.worker.reports.metrics import (
    EngineCollector,
    StepMetrics,
    ask_for_snapshot,
    describe_cache,
)

_log = EventLogger("worker")
_WARM_UP_TOKENS = 16


async def start_engine(start: Start) -> EngineThread:
    """Build the engine and start its thread."""
    config, models, stack = start.config, start.models, start.stack
    disk_cache = await asyncio.to_thread(_open_disk_cache, start)
    if disk_cache is not None:
        stack.push_async_callback(asyncio.to_thread, disk_cache.close)
    engine = await asyncio.to_thread(_build_engine, start, disk_cache)
    # The objects of the libraries and the model live as long as the process. If they are not frozen, the
    # garbage collector sometimes visits all of them, which stops the steps for a quarter of a second.
    gc.collect()
    gc.freeze()
    watch = StepWatch(config.max_step_seconds, await asyncio.to_thread(_known_step_seconds, engine))
    thread = EngineThread(
        engine,
        StepMetrics(start.registry).stepped,
        start.failure.set_result,
        start.state.set_stalled,
        watch,
        _lent_processors(start),
        rests=config.shares_processors and engine.memory.device.type == "cpu",
    )
    thread.start()
    stack.push_async_callback(_stop_engine, thread)
    if models.ranks is not None:
        _fail_with_ranks(thread, models.ranks)
    _describe(start, thread)
    return thread


def _lent_processors(start: Start) -> LentProcessors | None:
    shared = start.config.shared_processors
    if shared is None:
        return None
    try:
        processors = LentProcessors(shared)
    except OSError as error:
        # Programs that clean up the folder for temporary files may remove the file while the stack runs.
        _log.warning("processors_not_lent", reason=str(error))
        return None
    start.stack.callback(processors.close)
    return processors


def _fail_with_ranks(thread: EngineThread, ranks: Ranks) -> None:
    """Give up the engine when a rank fails, even if no step is running that would notice it."""
    loop = asyncio.get_running_loop()

    def give_up(failure: Future[str]) -> None:
        error = EngineFailedError(f"the engine has failed: {failure.result()}")
        with suppress(RuntimeError):  # the loop is closed: the worker is ending
            loop.call_soon_threadsafe(thread.give_up, error)

    ranks.failure.add_done_callback(give_up)


async def _stop_engine(thread: EngineThread) -> None:
    if not await thread.stop():
        _log.error("engine_not_stopped", details="its step does not end; the process ends without it")


def _describe(start: Start, thread: EngineThread) -> None:
    """Register the metrics of the process, the engine and its blocks."""
    registry, memory = start.registry, start.models.memory
    registry.register(EngineCollector(partial(ask_for_snapshot, thread)))
    ProcessCollector(registry=registry)
    block_size, block_bytes = memory.shape.block_size, memory.shape.block_bytes
    describe_cache(registry, block_size=block_size, num_blocks=memory.num_blocks, block_bytes=block_bytes)


def _open_disk_cache(start: Start) -> DiskCache | None:
    """Open the folder of evicted blocks, if it is configured, with the blocks of an earlier worker."""
    if start.config.disk_cache is None:
        return None
    folder, num_bytes = start.config.disk_cache
    block_bytes = start.models.memory.shape.block_bytes
    return DiskCache(Path(folder), num_bytes, block_bytes, start.identity.fingerprint)


def _build_engine(start: Start, disk_cache: DiskCache | None) -> Engine:
    """Build an engine, and compile all kernels that its requests will need; takes seconds."""
    config, (model, draft, memory, ranks) = start.config, start.models
    limits = SchedulerConfig.of(config)
    speculator = None
    if config.role == "decode":
        speculator = make_speculator(config, draft, model, memory, limits)
    swap_memory = allocate_swap_space(config, memory)
    parts = EngineParts(
        listener=start.publisher if start.events is None else Listeners(start.publisher, start.events),
        describe=None if start.events is None else start.events.described,
        swap_memory=swap_memory,
        host_cache=_host_cache(config, memory),
        disk_cache=disk_cache,
        speculator=speculator,
        runner=None if ranks is None else ParallelRunner(model, memory, swap_memory, ranks),
    )
    engine = Engine(model, memory, limits, start.identity.max_model_len, parts)
    _warm_up(engine)
    if memory.device.type == "cuda" and config.role == "decode":
        _capture_decode_steps(engine)
    return engine


def _host_cache(config: WorkerConfig, memory: KvMemory) -> HostCache | None:
    if not config.host_cache_bytes:
        return None
    num_blocks = config.host_cache_bytes // memory.shape.block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"one KV block takes {memory.shape.block_bytes} bytes; --host-cache must have room for two"
        )
    host = torch.device("cpu")
    return HostCache(KvMemory(memory.shape, num_blocks, host, is_pinned=memory.blocks.is_cuda, is_pool=False))


def _warm_up(engine: Engine) -> None:
    """Run one prompt, with a draft model too, so that no request waits for the compilation of a kernel.

    On the CPU kernels do not depend on the number of tokens, so the prompt is short.
    """
    engine.memory.copy_within([(0, 1)])
    length = _full_length(engine)
    _run_prompt(engine, length if engine.memory.blocks.is_cuda else min(_WARM_UP_TOKENS, length))


def _known_step_seconds(engine: Engine) -> dict[StepKind, float]:
    """Measure the time of a step with the most tokens, after its kernels have been compiled."""
    start, length = perf_counter(), _full_length(engine)
    _run_prompt(engine, length)
    return {StepKind.of(length, length * length): perf_counter() - start}


def _full_length(engine: Engine) -> int:
    return min(engine.scheduler.config.max_num_batched_tokens, max(1, engine.max_model_len - 3))


def _run_prompt(engine: Engine, length: int) -> None:
    prompt = Sequence(
        "warm-up", [0] * length, length, SamplingParams(max_tokens=3, ignore_eos=True), b"warm-up"
    )
    engine.add_request(prompt)
    while not engine.is_idle:
        engine.step()
    engine.pool.clear_cache()  # the tiers are not cleared: blocks on disk outlive the worker


def _capture_decode_steps(engine: Engine) -> None:
    """Capture decode steps as CUDA graphs; a model that cannot be captured runs without them."""
    max_num_seqs = engine.scheduler.config.max_num_seqs
    try:
        engine.runner.capture_decode_steps(CudaCapture(), max_num_seqs, engine.max_model_len)
    except Exception as error:  # the model's own code may raise anything
        torch.cuda.empty_cache()
        _log.warning("decode_steps_not_captured", error=f"{type(error).__name__}: {error}")
