"""Loads the models of a worker, and allocates the memory of their blocks."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import torch

from quire.engine.device import choose_device
from quire.engine.engine import longest_sequence
from quire.engine.kv_cache.memory import KvMemory, dtype_name
from quire.engine.kv_cache.shared_memory import allocate_shared
from quire.engine.model.check import UnsupportedModelError
from quire.engine.model.collectives import RanksError
from quire.engine.pool_memory import allocate_pool
from quire.engine.ranks.ranks import Ranks, load_adapter_on, start_ranks
from quire.engine.runner.processors import num_cores
from quire.engine.speculation.speculators import DraftModelError, load_draft_model
from quire.engine.weights.adapters import Adapter
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kvindex.kv_layout import KvLayout
from quire.models.embeddings import NoEmbeddingsError, read_embedding_config
from quire.models.source import pin_revision, text_digest
from quire.protos import worker_pb2
from quire.rpc.errors import BadFileError
from quire.services.server.log import EventLogger
from quire.services.worker.config import WorkerConfig
from quire.services.worker.identity import WorkerIdentity

_log = EventLogger("worker")


class Models(NamedTuple):
    """The models of a worker, and the memory of their blocks.

    Attributes:
        ranks: the other processes that the model is divided among; None if there are none.
    """

    model: LoadedModel
    draft: LoadedModel | None
    memory: KvMemory
    ranks: Ranks | None

    def load_adapter(self, path: str) -> Adapter:
        """Load an adapter of the model; see ``read_adapter``.

        Raises:
            ChildProcessError: another process that the model is divided among has failed.
        """
        try:
            return load_adapter_on(self.ranks, path, self.model)
        except RanksError as error:
            raise ChildProcessError(str(error)) from error

    def close(self) -> None:
        """End the other processes."""
        if self.ranks is not None:
            self.ranks.close()


def load_models(config: WorkerConfig) -> Models:
    """Load the model, and a decode worker's draft model, and allocate the block pool; takes seconds.

    Raises:
        BadFileError: the model's folder is missing or contains no model, or the hub does not have the model.
        ValueError: the pool would hold fewer than two blocks, or the model cannot be divided as asked.
        ChildProcessError: another process that the model is divided among has failed.
    """
    device = choose_device()
    with ExitStack() as stack:
        if (ranks := start_ranks(config, device)) is not None:
            stack.callback(ranks.close)
            _warn_of_few_processors(config)
        try:
            models = _load_models(config, device, ranks)
        except RanksError as error:
            raise ChildProcessError(f"the worker did not start: {error}") from error
        stack.pop_all()
        return models


def _warn_of_few_processors(config: WorkerConfig) -> None:
    num_processes, available = config.tensor_parallel_size, num_cores()
    if available < num_processes:
        details = "they wait for each other in each layer: give the worker more, or lower the size"
        _log.warning("few_processors", processes=num_processes, processors=available, details=details)


def _load_models(config: WorkerConfig, device: torch.device, ranks: Ranks | None) -> Models:
    collectives = None if ranks is None else ranks.collectives
    with _load_errors(config.model_path):
        model = load_model(
            config.model_path,
            config.dtype,
            device,
            config.weight_dtype,
            config.arithmetic,
            collectives,
            config.weights_file,
        )
    # A prefill worker samples one token of each request, so it needs no draft tokens.
    with _load_errors(config.draft_model):
        draft = load_draft_model(config, model, device) if config.role == "decode" else None
    return Models(model, draft, _allocate_pool(config, model, draft, device, ranks), ranks)


@contextmanager
def _load_errors(model: str | None) -> Iterator[None]:
    """Convert the errors of loading a model to a BadFileError that names the model."""
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
    """Allocate the block pool. Other workers can map it if the system and the settings allow that."""
    allocate = partial(
        allocate_pool,
        config,
        model,
        draft,
        device,
        config.num_sharing,
        num_copies=config.num_weights_files,
        cache_bytes=config.host_cache_bytes,
    )
    if ranks is not None:
        return allocate(share=ranks.share_pool)
    if config.transport != "auto":
        return allocate()
    try:
        return allocate(share=allocate_shared)
    except OSError as error:
        _log.warning("pool_not_shared", reason=str(error), details="other workers get its blocks in messages")
        return allocate()


def identify(config: WorkerConfig, worker_id: str, models: Models) -> WorkerIdentity:
    """Return the identity of a worker; its epoch identifies this start."""
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
            arithmetic=model.arithmetic,
        ),
        num_blocks=memory.num_blocks,
        max_model_len=longest_sequence(model, memory, config.max_model_len),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        cluster_secret=config.cluster_secret,
        embedding=_embedding_model(config, model),
        text_digest=text_digest(model.folder),
    )


def _embedding_model(config: WorkerConfig, model: LoadedModel) -> worker_pb2.EmbeddingModel:
    size = getattr(model.module.config.get_text_config(), "hidden_size", 0)
    try:
        with _load_errors(config.model_path):
            return worker_pb2.EmbeddingModel(**asdict(read_embedding_config(model.folder, size)))
    except NoEmbeddingsError as error:
        return worker_pb2.EmbeddingModel(problem=str(error))
