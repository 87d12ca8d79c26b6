"""Builds a worker's engine from its settings: models, block pool, the tiers below it, warm-up."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from quire.engine.device import choose_device
from quire.engine.engine import Engine, EngineParts, longest_sequence
from quire.engine.kv_cache.block_pool import BlockListener
from quire.engine.kv_cache.disk_cache import DiskCache
from quire.engine.kv_cache.host_cache import HostCache
from quire.engine.kv_cache.memory import KvMemory, dtype_name
from quire.engine.kv_cache.shared_memory import allocate_shared
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.collectives import RanksError
from quire.engine.model.decode_graphs import CudaCapture
from quire.engine.pool_memory import allocate_pool, allocate_swap_space
from quire.engine.ranks.parallel_runner import ParallelRunner
from quire.engine.ranks.ranks import Ranks, start_ranks
from quire.engine.scheduling.schedule import StepKind
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.speculation.speculators import DraftModelError, load_draft_model, make_speculator
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kvindex.block_hash import block_hash
from quire.kvindex.kv_layout import KvLayout
from quire.kvtransfer.transports.transport import Transport
from quire.models.source import pin_revision
from quire.rpc.errors import BadFileError
from quire.sampling.params import SamplingParams
from quire.services.server.log import get_logger
from quire.services.server.process import num_processors
from quire.services.worker.config import WorkerConfig
from quire.services.worker.identity import WorkerIdentity
from quire.settings.setting import SettingError

_log = get_logger("worker")


class Models(NamedTuple):
    """What a worker computes with, and the memory of its blocks.

    Attributes:
        ranks: the other processes that the model is divided among; None if there are none.
    """

    model: LoadedModel
    draft: LoadedModel | None
    memory: KvMemory
    ranks: Ranks | None

    def close(self) -> None:
        """End the other processes."""
        if self.ranks is not None:
            self.ranks.close()


def load_models(config: WorkerConfig) -> Models:
    """Load the model, and a decode worker's draft model, and allocate the block pool; takes seconds.

    Raises:
        BadFileError: the model's folder is missing or holds no model, or the hub does not have it.
        ValueError: the pool would hold fewer than two blocks, or the model cannot be divided as asked.
        ChildProcessError: another process that the model is divided among has failed.
    """
    device = choose_device()
    with ExitStack() as stack:
        if (ranks := start_ranks(config, device)) is not None:
            stack.callback(ranks.close)
            _tell_of_few_processors(config)
        try:
            models = _load_models(config, device, ranks)
        except RanksError as error:
            raise ChildProcessError(f"the worker did not start: {error}") from error
        stack.pop_all()
        return models


def _tell_of_few_processors(config: WorkerConfig) -> None:
    num_processes, available = config.tensor_parallel_size, num_processors()
    if available < num_processes:
        details = "they wait for each other in each layer: give the worker more, or lower the size"
        _log.warning("few_processors", processes=num_processes, processors=available, details=details)


def _load_models(config: WorkerConfig, device: torch.device, ranks: Ranks | None) -> Models:
    collectives = None if ranks is None else ranks.collectives
    with _load_errors(config.model_path):
        model = load_model(config.model_path, config.dtype, device, config.weight_dtype, collectives)
    # A prefill worker samples one token of each request, so it needs no draft tokens.
    with _load_errors(config.draft_model):
        draft = load_draft_model(config, model, device) if config.role == "decode" else None
    return Models(model, draft, _allocate_pool(config, model, draft, device, ranks), ranks)


@contextmanager
def _load_errors(model: str | None) -> Iterator[None]:
    """Raise a BadFileError, which names the model, instead of the errors that say why it cannot be loaded."""
    try:
        yield
    except DraftModelError:
        raise
    except (OSError, ValueError, UnsupportedModelError) as error:
        raise BadFileError(f"cannot load the model {model}: {error}") from error


def _allocate_pool(
    config: WorkerConfig,
    model: LoadedModel,
    draft: LoadedModel | None,
    device: torch.device,
    ranks: Ranks | None,
) -> KvMemory:
    """Allocate the block pool, so that other workers can map it if the system and the settings allow."""
    allocate = partial(allocate_pool, config, model, draft, device, config.num_sharing_gpu)
    if ranks is not None:
        return allocate(share=ranks.share_pool)
    if config.transport not in ("auto", Transport.SHARED):
        return allocate()
    try:
        return allocate(share=allocate_shared)
    except OSError as error:
        if config.transport == Transport.SHARED:
            raise SettingError(
                f"--transport shared needs memory that processes can share: {error}"
            ) from error
        _log.warning("pool_not_shared", reason=str(error), details="other workers get its blocks in messages")
        return allocate()


def identify(config: WorkerConfig, worker_id: str, models: Models) -> WorkerIdentity:
    """Return what others need to know about a worker; its epoch names this start."""
    model, memory = models.model, models.memory
    return WorkerIdentity(
        worker_id=worker_id,
        epoch=secrets.token_hex(8),
        model=config.model_name,
        model_path=pin_revision(config.model_path, model.folder),
        layout=KvLayout(
            **asdict(memory.shape),
            model_digest=model.digest,
            compute_dtype=dtype_name(model.dtype),
            device=memory.device.type,
        ),
        num_blocks=memory.num_blocks,
        max_model_len=longest_sequence(model, memory, config.max_model_len),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        cluster_secret=config.cluster_secret,
    )


def open_disk_cache(config: WorkerConfig, memory: KvMemory, identity: WorkerIdentity) -> DiskCache | None:
    """Open the folder of evicted blocks, if there is one; reads what an earlier worker left."""
    if config.disk_cache is None:
        return None
    folder, num_bytes = config.disk_cache
    return DiskCache(Path(folder), num_bytes, memory.shape.block_bytes, identity.fingerprint)


def build_engine(
    config: WorkerConfig,
    models: Models,
    identity: WorkerIdentity,
    listener: BlockListener | None,
    disk_cache: DiskCache | None,
) -> Engine:
    """Build an engine and compile all that its requests will run; takes seconds."""
    model, draft, memory, ranks = models
    limits = SchedulerConfig.of(config)
    speculator = None
    if config.role == "decode":
        speculator = make_speculator(config, draft, model, memory, limits, block_hash)
    swap_memory = allocate_swap_space(config, memory)
    parts = EngineParts(
        listener=listener,
        swap_memory=swap_memory,
        host_cache=_host_cache(config, memory),
        disk_cache=disk_cache,
        speculator=speculator,
        runner=None if ranks is None else ParallelRunner(model, memory, swap_memory, ranks),
    )
    engine = Engine(model, memory, limits, block_hash, identity.max_model_len, parts)
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
            f"one KV block takes {memory.shape.block_bytes} bytes; --host-cache must hold two at least"
        )
    host = torch.device("cpu")
    return HostCache(KvMemory(memory.shape, num_blocks, host, is_pinned=memory.blocks.is_cuda))


def _warm_up(engine: Engine) -> None:
    """Run one prompt, a draft model's part too, so that no request waits for a kernel to be compiled."""
    engine.memory.copy_within([(0, 1)])
    _run_full_step(engine)


def known_step_seconds(engine: Engine) -> dict[StepKind, float]:
    """Time a step of as many tokens as one may have; its kernels have been compiled."""
    start = perf_counter()
    _run_full_step(engine)
    length = _full_length(engine)
    return {StepKind.of(length, length * length): perf_counter() - start}


def _full_length(engine: Engine) -> int:
    return min(engine.scheduler.config.max_num_batched_tokens, engine.max_model_len - 3)


def _run_full_step(engine: Engine) -> None:
    length = _full_length(engine)
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
