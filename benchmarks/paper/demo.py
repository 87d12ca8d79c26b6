"""The demo model on quire's engine, and prompts in its language."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import torch
from tokenizers import Tokenizer

from quire.engine.engine import Engine, EngineParts
from quire.engine.kv_cache.memory import KvMemory
from quire.engine.scheduling.scheduler import SchedulerConfig
from quire.engine.sequences.sequence import Sequence
from quire.engine.weights.loader import LoadedModel, load_model
from quire.kvindex.block_hash import block_hash
from quire.models.notes import ITEMS, sample_notes, text
from quire.models.source import demo_model_path
from quire.sampling.params import SamplingParams

CPU = torch.device("cpu")

Prompts = Callable[[int, int], list[int]]
"""Returns the tokens of a prompt of a given length, with a seed."""


def load_demo() -> LoadedModel:
    """Load the bundled model in float32."""
    return load_model(str(demo_model_path()), "float32", CPU)


def make_prompts() -> Prompts:
    """Return a writer of prompts: notes of the demo model's language, cut to the length."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))

    def prompt(length: int, seed: int) -> list[int]:
        random, tokens = Random(seed), list[int]()
        while len(tokens) < length:
            num_notes = min(len(ITEMS), length // 8 + 1)
            tokens += tokenizer.encode(text(sample_notes(random, num_notes))).ids
        return tokens[:length]

    return prompt


def make_engine(
    model: LoadedModel,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int = 64,
    num_swap_blocks: int = 0,
) -> Engine:
    """Return an engine on the CPU with the defaults of a worker."""
    shape = model.kv_shape(block_size)
    limits = SchedulerConfig(block_size, max_num_seqs, max_num_batched_tokens=512)
    swap_memory = KvMemory(shape, num_swap_blocks, CPU) if num_swap_blocks else None
    memory = KvMemory(shape, num_blocks, CPU)
    return Engine(model, memory, limits, block_hash, parts=EngineParts(swap_memory=swap_memory))


def as_sequence(index: int, prompt: list[int], params: SamplingParams, root: bytes | None = None) -> Sequence:
    """Return a request; without a ``root`` of hashes that others have too, it shares no block with them."""
    own = index.to_bytes(16, "little")
    return Sequence(str(index), list(prompt), len(prompt), params, own if root is None else root)


def run_to_end(engine: Engine, sequences: Iterable[Sequence]) -> None:
    """Compute requests that all wait from the start."""
    for sequence in sequences:
        engine.add_request(sequence)
    while not engine.is_idle:
        engine.step()
    engine.check_conservation()
