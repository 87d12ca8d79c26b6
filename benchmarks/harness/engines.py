"""Makes engines on the CPU, with or without a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from quire.engine.engine import Engine
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import AttentionCall, KvHeads
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel
from quire.sampling.params import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 16


def model_without_layers(max_position_embeddings: int, *, window: int | None = None) -> LoadedModel:
    """Return a model of one layer with one KV head of one dimension, for a runner that computes nothing."""
    return LoadedModel(
        module=cast("Any", torch.nn.Module()),
        folder=Path(),
        digest="",
        dtype=torch.float32,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        max_position_embeddings=max_position_embeddings,
        vocab_size=8,
        eos_token_ids=frozenset({1}),
        heads=KvHeads(1, 1, 1, (AttentionCall(window, False, 1.0, None, None),)),
        recipe=None,
        arithmetic="",
    )


def make_engine(
    model: LoadedModel,
    num_blocks: int,
    *,
    block_size: int = BLOCK_SIZE,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
) -> Engine:
    """Return an engine with a pool of blocks."""
    shape = model.kv_shape(block_size)
    limits = SchedulerConfig(block_size, max_num_seqs, max_num_batched_tokens)
    memory = KvMemory(shape, num_blocks, CPU)
    return Engine(model, memory, limits)


def as_sequence(index: int, prompt: list[int], params: SamplingParams) -> Sequence:
    """Return a request whose root of hashes is its own, so that it shares no blocks with others."""
    return Sequence(str(index), list(prompt), len(prompt), params, index.to_bytes(16, "little"))


def run_to_end(engine: Engine, sequences: Iterable[Sequence]) -> None:
    """Compute requests that all wait from the start."""
    for sequence in sequences:
        engine.add_request(sequence)
    while not engine.is_idle:
        engine.step()
    engine.check_conservation()
