"""Padding a decode step to a rung of the ladder changes no logits.

A GPU replays a graph; here the captured function runs again, over the same fixed memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.decode_graphs import DecodeGraphs
from quire.engine.model.step_tensors import StepTensors
from quire.engine.runner.model_runner import ModelRunner
from quire.engine.weights.loader import load_model
from quire.kernels.metadata import AttentionMetadata

VOCAB_SIZE = 11
CPU = torch.device("cpu")
SLOTS = torch.zeros(64)


def run_again(function: Callable[[], None]) -> Callable[[], None]:
    return function


def forward(step: StepTensors) -> torch.Tensor:
    """Write a token's id into its slot and return one-hot logits of what each sequence holds."""
    metadata = step.metadata
    for slot, token in zip(metadata.slot_mapping.tolist(), step.input_ids.tolist(), strict=True):
        if slot >= 0:
            SLOTS[slot] = token
    logits = torch.full((step.logit_rows.shape[0], VOCAB_SIZE), float("nan"))
    starts = metadata.query_starts.tolist()
    for row, (table, seq_len) in enumerate(
        zip(metadata.block_tables.tolist(), metadata.seq_lens.tolist(), strict=True)
    ):
        if starts[row + 1] > starts[row]:
            slots = [table[p // 4] * 4 + p % 4 for p in range(seq_len)]
            total = int(sum(SLOTS[slot].item() for slot in slots)) % VOCAB_SIZE
            logits[step.logit_rows[row]] = torch.nn.functional.one_hot(
                torch.tensor(total), VOCAB_SIZE
            ).float()
    return logits


def decode_step(
    tables: list[list[int]], seq_lens: list[int], tokens: list[int], block_size: int = 4
) -> StepTensors:
    num_seqs = len(tables)
    places = [divmod(seq_len - 1, block_size) for seq_len in seq_lens]
    slots = [table[block] * block_size + at for table, (block, at) in zip(tables, places, strict=True)]
    metadata = AttentionMetadata(
        block_tables=torch.tensor(tables, dtype=torch.int32),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        max_new_tokens=1,
    )
    positions = torch.tensor(seq_lens) - 1
    return StepTensors(torch.tensor(tokens), positions, torch.arange(num_seqs), metadata)


def test_padded_steps_give_the_same_logits() -> None:
    SLOTS[:] = torch.arange(64) % 7
    graphs = DecodeGraphs(forward, run_again, 6, 4, CPU)
    steps = [
        decode_step([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], [5, 8, 3, 1, 6], [3, 1, 4, 1, 5]),
        decode_step([[2, 1, 3]], [9], [9]),
        decode_step([[11], [12], [13]], [1, 2, 4], [2, 6, 5]),
    ]
    for step in steps:
        before = SLOTS.clone()
        expected = forward(step)
        after, SLOTS[:] = SLOTS.clone(), before
        assert graphs.fits(step)
        assert torch.equal(graphs.run(step), expected)
        assert torch.equal(SLOTS, after), "the padding wrote into a slot"


def test_batches_that_fit_a_graph() -> None:
    graphs = DecodeGraphs(forward, run_again, 3, 2, CPU)
    step = decode_step([[1, 2]] * 3, [5, 6, 7], [1, 2, 3])
    assert graphs.fits(step)
    assert not graphs.fits(decode_step([[1, 2]] * 4, [5, 6, 7, 8], [1, 2, 3, 4])), "more than the last rung"
    assert not graphs.fits(decode_step([[1, 2, 3]], [9], [1])), "a longer block table"
    assert not graphs.fits(step._replace(logit_rows=torch.arange(4))), "logits of a prompt are wanted too"
    assert not graphs.fits(step._replace(metadata=step.metadata._replace(max_new_tokens=None)))


WAITING = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "nonzero", "unique"}
"""Methods for which the host waits until a GPU has the numbers."""


class _NumbersStayThere(TorchFunctionMode):
    """Refuse to look at numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.__name__ not in WAITING, function.__name__
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3", "gpt_neox", "opt"])
def test_a_step_never_waits_for_its_numbers(architecture: str, tiny_model: Callable[..., Any]) -> None:
    model = load_model(str(tiny_model(architecture)), "float32", CPU)
    runner = ModelRunner(replace(model, recipe=None), KvMemory(model.kv_shape(16).flat, 16, CPU))
    step = decode_step([[1, 2], [3, 4]], [17, 32], [3, 1], block_size=16)
    expected = runner.forward(step)
    with _NumbersStayThere():
        assert torch.equal(runner.forward(step), expected)
