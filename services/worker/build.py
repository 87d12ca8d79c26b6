"""Builds a worker's engine from its settings: block pool, tiers below it, guesses, warm-up."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import torch

from quire.engine.block_pool import BlockListener
from quire.engine.decode_graphs import CudaCapture
from quire.engine.device import default_num_blocks
from quire.engine.disk_cache import DiskCache
from quire.engine.engine import Engine, EngineParts
from quire.engine.host_cache import HostCache
from quire.engine.kv_memory import KvMemory
from quire.engine.model_loader import LoadedModel
from quire.engine.sampling_params import SamplingParams
from quire.engine.scheduler import SchedulerConfig
from quire.engine.sequence import Sequence
from quire.engine.speculation import Speculator
from quire.engine.speculators import load_draft_model, make_speculator
from quire.kvindex.block_hash import block_hash
from quire.services.server.log import get_logger
from quire.services.worker.config import WorkerConfig
from quire.services.worker.identity import WorkerIdentity

_log = get_logger("worker")


def load_draft(config: WorkerConfig, model: LoadedModel, device: torch.device) -> LoadedModel | None:
    """Load the model that guesses for a decode worker, if one does."""
    if config.role == "prefill":  # it draws one token of each request: there is nothing to guess
        return None
    return load_draft_model(config.speculation_config, config.model_path, model, config.dtype, device)


def allocate_blocks(
    config: WorkerConfig, model: LoadedModel, draft: LoadedModel | None, device: torch.device
) -> KvMemory:
    """Allocate the block pool's memory; where it takes what a GPU has, it leaves room for the draft's blocks.

    Raises:
        ValueError: it would hold fewer than two blocks.
    """
    shape = model.kv_shape(config.block_size, config.kv_cache_dtype)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_memory_bytes is not None:
        num_blocks = config.kv_memory_bytes // shape.block_bytes
    else:
        draft_shape = None if draft is None else draft.kv_shape(config.block_size)
        num_blocks = default_num_blocks(device, shape, draft_shape, config.num_sharing_gpu)
    if num_blocks < 2:
        raise ValueError(f"one KV block takes {shape.block_bytes} bytes; --kv-memory must hold two at least")
    return KvMemory(shape, num_blocks, device)


def open_disk_cache(config: WorkerConfig, memory: KvMemory, identity: WorkerIdentity) -> DiskCache | None:
    """Open the folder of evicted blocks, if there is one; reads what an earlier worker left."""
    if config.disk_cache is None:
        return None
    folder, num_bytes = config.disk_cache
    return DiskCache(Path(folder), num_bytes, memory.shape.block_bytes, identity.fingerprint)


def build_engine(
    config: WorkerConfig,
    model: LoadedModel,
    draft: LoadedModel | None,
    memory: KvMemory,
    identity: WorkerIdentity,
    listener: BlockListener | None,
    disk_cache: DiskCache | None,
) -> Engine:
    """Build an engine and compile all that its requests will run; takes seconds."""
    limits = SchedulerConfig(
        config.block_size, config.max_num_seqs, config.max_num_batched_tokens, config.preemption
    )
    parts = EngineParts(
        listener=listener,
        swap_memory=_swap_memory(config, memory),
        host_cache=_host_cache(config, memory),
        disk_cache=disk_cache,
        speculator=_make_speculator(config, draft, model, memory, limits),
    )
    engine = Engine(model, memory, limits, block_hash, identity.max_model_len, parts)
    _warm_up(engine)
    if memory.device.type == "cuda" and config.role == "decode":
        _capture_decode_steps(engine)
    return engine


def _swap_memory(config: WorkerConfig, memory: KvMemory) -> KvMemory | None:
    num_blocks = config.swap_memory_bytes // memory.shape.block_bytes
    is_pinned = memory.device.type == "cuda"
    return (
        KvMemory(memory.shape, num_blocks, torch.device("cpu"), is_pinned=is_pinned) if num_blocks else None
    )


def _make_speculator(
    config: WorkerConfig,
    draft: LoadedModel | None,
    model: LoadedModel,
    memory: KvMemory,
    limits: SchedulerConfig,
) -> Speculator | None:
    if config.role == "prefill":
        return None
    return make_speculator(config.speculation_config, draft, model, memory, limits, block_hash)


def _host_cache(config: WorkerConfig, memory: KvMemory) -> HostCache | None:
    if not config.host_cache_bytes:
        return None
    num_blocks = config.host_cache_bytes // memory.shape.block_bytes
    if num_blocks < 2:
        raise ValueError(
            f"one KV block takes {memory.shape.block_bytes} bytes; --host-cache must hold two at least"
        )
    host = torch.device("cpu")
    return HostCache(KvMemory(memory.shape, num_blocks, host, is_pinned=memory.blocks.is_cuda))


def _warm_up(engine: Engine) -> None:
    """Run one prompt, a draft model's part too, so that no request waits for a kernel to be compiled."""
    engine.memory.copy_within([(0, 1)])
    _run_full_step(engine)


def full_step_seconds(engine: Engine) -> float:
    """Time a step of as many tokens as one may have; its kernels have been compiled."""
    start = perf_counter()
    _run_full_step(engine)
    return perf_counter() - start


def _run_full_step(engine: Engine) -> None:
    length = min(engine.scheduler.config.max_num_batched_tokens, engine.max_model_len - 3)
    prompt = Sequence(
        "warm-up", [0] * length, length, SamplingParams(max_tokens=3, ignore_eos=True), b"warm-up"
    )
    engine.add_request(prompt)
    while not engine.is_idle:
        engine.step()
    engine.pool.clear_cache()  # not the tiers: a disk's blocks outlive the worker


def _capture_decode_steps(engine: Engine) -> None:
    """Hold decode steps in CUDA graphs; a model that cannot be captured runs without."""
    max_num_seqs = engine.scheduler.config.max_num_seqs
    try:
        engine.runner.capture_decode_steps(CudaCapture(), max_num_seqs, engine.max_model_len)
    except Exception as error:  # whatever foreign model code raises
        torch.cuda.empty_cache()
        _log.warning("decode_steps_not_captured", error=f"{type(error).__name__}: {error}")
