"""The recurrence of Mamba 2 over states in blocks, compared with the formula in float64."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.states import States, StateShape, with_states
from quire.kernels.cpu.mamba import Mamba
from quire.kernels.metadata import AttentionMetadata
from quire.kvindex.kv_layout import KvShape

BLOCK_SIZE, NUM_HEADS, HEAD_DIM, NUM_GROUPS, SIZE, NUM_TAPS = 8, 4, 8, 2, 32, 4
NUM_CHANNELS = NUM_HEADS * HEAD_DIM + 2 * NUM_GROUPS * SIZE
LENGTHS = (1, 2, 9, 37)
NUM_BLOCKS = 5


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_layer(num_taps: int = NUM_TAPS) -> Mamba:
    return Mamba(
        taps=torch.randn(num_taps, NUM_CHANNELS),
        conv_bias=torch.randn(NUM_CHANNELS),
        decay=-torch.rand(NUM_HEADS) * 3,
        step_bias=torch.randn(NUM_HEADS),
        skip=torch.randn(NUM_HEADS),
        head_dim=HEAD_DIM,
        num_groups=NUM_GROUPS,
        row_size=SIZE,
    )


class Blocks:
    """Blocks in which each sequence has a table of its own; what is not written is not a number."""

    def __init__(self, layer: Mamba) -> None:
        self.layer = layer
        # Two layers with states, whose rows fill several frames, and the last one only in part.
        shape = StateShape(2, layer.num_rows, SIZE)
        flat = KvShape(2, 1, BLOCK_SIZE, 24, "float32")
        self.memory = KvMemory(
            with_states(flat, shape), len(LENGTHS) * NUM_BLOCKS, torch.device("cpu"), is_pool=False
        )
        self.memory.blocks.fill_(float("nan"))
        self.states = States(self.memory, shape)
        number = self.memory.shape.num_frames
        self.tables = torch.randperm(len(LENGTHS) * NUM_BLOCKS).view(len(LENGTHS), -1)
        self.frames = (self.tables * number + torch.arange(number)[:, None, None]).int()

    def run(self, inputs: list[torch.Tensor], firsts: list[int], ends: list[int]) -> list[torch.Tensor]:
        """Run a step with the tokens from ``firsts`` to ``ends`` of the sequences that have any."""
        rows = [row for row, (first, end) in enumerate(zip(firsts, ends, strict=True)) if first < end]
        lengths = [ends[row] - firsts[row] for row in rows]
        packed = torch.cat([inputs[row][firsts[row] : ends[row]] for row in rows])
        metadata = AttentionMetadata(
            block_tables=self.frames[:, rows].contiguous(),
            query_starts=torch.tensor([0, *lengths]).cumsum(0).int(),
            seq_lens=torch.tensor([ends[row] for row in rows], dtype=torch.int32),
            slot_mapping=torch.zeros(0),
        )
        new, steps = packed[:, :NUM_CHANNELS], packed[:, NUM_CHANNELS:]
        output = self.layer.advance(new, steps, metadata, self.states.places(1))
        parts = iter(output.split(lengths))
        return [next(parts) if row in rows else output[:0] for row in range(len(firsts))]

    def block(self, sequence: int, index: int) -> bytes:
        return self.memory.read(int(self.tables[sequence, index]))


def make_inputs() -> list[torch.Tensor]:
    return [torch.randn(length, NUM_CHANNELS + NUM_HEADS) for length in LENGTHS]


def by_formula(layer: Mamba, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one sequence, in float64."""
    taps, conv_bias, decay, step_bias, skip = (each.double() for each in layer[:5])
    new, steps = inputs[:, :NUM_CHANNELS].double(), inputs[:, NUM_CHANNELS:].double()
    padded = torch.cat([new.new_zeros(len(taps) - 1, NUM_CHANNELS), new])
    mixed = sum(tap * padded[j : j + len(new)] for j, tap in enumerate(taps)) + conv_bias
    mixed = torch.nn.functional.silu(mixed)
    sizes = [NUM_HEADS * HEAD_DIM, NUM_GROUPS * SIZE, NUM_GROUPS * SIZE]
    x, b, c = (
        part.view(len(new), heads, -1) for part, heads in zip(mixed.split(sizes, 1), (4, 2, 2), strict=True)
    )
    b, c = (each.repeat_interleave(NUM_HEADS // NUM_GROUPS, dim=1) for each in (b, c))
    step = torch.nn.functional.softplus(steps + step_bias)
    state = new.new_zeros(NUM_HEADS, HEAD_DIM, SIZE)
    outputs = []
    for t in range(len(new)):
        state = state * torch.exp(step[t] * decay)[:, None, None]
        state = state + (step[t][:, None] * x[t])[..., None] * b[t][:, None]
        outputs.append((state @ c[t][..., None])[..., 0] + skip[:, None] * x[t])
    return torch.stack(outputs).flatten(1)


@pytest.mark.parametrize("num_taps", [2, 4])
def test_the_outputs_are_those_of_the_formula(num_taps: int) -> None:
    layer, inputs = make_layer(num_taps), make_inputs()
    found = Blocks(layer).run(inputs, [0] * 4, list(LENGTHS))
    for outputs, sequence in zip(found, inputs, strict=True):
        torch.testing.assert_close(outputs.double(), by_formula(layer, sequence), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_every_split_gives_the_same_bits(seed: int) -> None:
    """Outputs and all blocks are equal: those of full blocks have the state after their last token."""
    layer, inputs, random = make_layer(), make_inputs(), Random(seed)
    whole, split = Blocks(layer), Blocks(layer)
    torch.set_num_threads(1)
    expected = whole.run(inputs, [0] * 4, list(LENGTHS))
    torch.set_num_threads(2)
    parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    firsts = [0] * 4
    while firsts != list(LENGTHS):
        ends = [
            min(length, first + random.choice([0, 1, 1, 3, 8, 11]))
            for first, length in zip(firsts, LENGTHS, strict=True)
        ]
        if firsts != ends:
            for found, outputs in zip(parts, split.run(inputs, firsts, ends), strict=True):
                found.append(outputs)
        firsts = ends
    for sequence, found in enumerate(parts):
        assert torch.equal(torch.cat(found), expected[sequence])
        for index in range(-(-LENGTHS[sequence] // BLOCK_SIZE)):
            assert whole.block(sequence, index) == split.block(sequence, index)


def test_a_state_can_be_continued_from_any_block() -> None:
    layer, inputs = make_layer(), make_inputs()
    blocks = Blocks(layer)
    expected = blocks.run(inputs, [0] * 4, list(LENGTHS))[3]
    for first in range(BLOCK_SIZE, LENGTHS[3], BLOCK_SIZE):
        again = blocks.run(inputs, [*LENGTHS[:3], first], list(LENGTHS))[3]
        assert torch.equal(again, expected[first:])
