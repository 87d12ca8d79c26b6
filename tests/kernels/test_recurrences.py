"""Recurrences over states in blocks, compared with their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.states import States, StateShape, with_states
from quire.kernels.cpu.delta_net import DeltaNet
from quire.kernels.cpu.mamba import Mamba
from quire.kernels.metadata import AttentionMetadata
from quire.kvindex.kv_layout import KvShape

Layer = Mamba | DeltaNet

BLOCK_SIZE, NUM_HEADS, NUM_GROUPS = 8, 4, 2
LENGTHS = (1, 2, 9, 37)
NUM_BLOCKS = 5


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_mamba(num_taps: int = 4, size: int = 32, head_dim: int = 8) -> Mamba:
    num_channels = NUM_HEADS * head_dim + 2 * NUM_GROUPS * size
    return Mamba(
        taps=torch.randn(num_taps, num_channels),
        conv_bias=torch.randn(num_channels),
        decay=-torch.rand(NUM_HEADS) * 3,
        step_bias=torch.randn(NUM_HEADS),
        skip=torch.randn(NUM_HEADS),
        head_dim=head_dim,
        num_groups=NUM_GROUPS,
        row_size=size,
    )


def make_delta_net(num_taps: int = 4, size: int = 48, key_dim: int = 24, most_replaced: int = 1) -> DeltaNet:
    num_channels = 2 * NUM_GROUPS * key_dim + NUM_HEADS * size
    return DeltaNet(
        taps=torch.randn(num_taps, num_channels),
        conv_bias=torch.randn(num_channels),
        decay=-torch.rand(NUM_HEADS),
        step_bias=torch.randn(NUM_HEADS),
        num_key_heads=NUM_GROUPS,
        key_dim=key_dim,
        row_size=size,
        most_replaced=most_replaced,
    )


MAKERS: list[Callable[[], Layer]] = [make_mamba, make_delta_net]


class Blocks:
    """Blocks in which each sequence has a table of its own; what is not written is not a number."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        # Two layers with states, whose rows fill several frames, and the last one only in part.
        shape = StateShape(2, layer.num_rows, layer.row_size)
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
        new, steps = packed.split([self.layer.taps.shape[1], num_steps(self.layer)], dim=1)
        output = self.layer.advance(new, steps, metadata, self.states.places(1))
        parts = iter(output.split(lengths))
        return [next(parts) if row in rows else output[:0] for row in range(len(firsts))]

    def block(self, sequence: int, index: int) -> bytes:
        return self.memory.read(int(self.tables[sequence, index]))


def num_steps(layer: Layer) -> int:
    return NUM_HEADS if isinstance(layer, Mamba) else 2 * NUM_HEADS


def make_inputs(layer: Layer) -> list[torch.Tensor]:
    return [torch.randn(length, layer.taps.shape[1] + num_steps(layer)) for length in LENGTHS]


def by_formula(layer: Layer, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one sequence, in float64."""
    taps, num_channels = layer.taps.double(), layer.taps.shape[1]
    new, steps = inputs.double().split([num_channels, num_steps(layer)], dim=1)
    padded = torch.cat([new.new_zeros(len(taps) - 1, num_channels), new])
    mixed = torch.nn.functional.silu(
        sum(tap * padded[j : j + len(new)] for j, tap in enumerate(taps)) + layer.conv_bias.double()
    )
    formula = mamba_formula if isinstance(layer, Mamba) else delta_formula
    return formula(layer, mixed, steps)  # type: ignore[arg-type]


def divided(
    mixed: torch.Tensor, heads: tuple[int, int, int], sizes: tuple[int, int, int]
) -> list[torch.Tensor]:
    """Return three parts of the channels by heads, of which those of groups are repeated."""
    parts = mixed.split([number * size for number, size in zip(heads, sizes, strict=True)], dim=1)
    return [
        part.view(len(mixed), number, size).repeat_interleave(NUM_HEADS // number, dim=1)
        for part, number, size in zip(parts, heads, sizes, strict=True)
    ]


def mamba_formula(layer: Mamba, mixed: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    heads, size = (NUM_HEADS, NUM_GROUPS, NUM_GROUPS), layer.row_size
    x, b, c = divided(mixed, heads, (layer.head_dim, size, size))
    step = torch.nn.functional.softplus(steps + layer.step_bias)
    state = mixed.new_zeros(NUM_HEADS, layer.head_dim, size)
    outputs = []
    for t in range(len(mixed)):
        state = state * torch.exp(step[t] * layer.decay)[:, None, None]
        state = state + (step[t][:, None] * x[t])[..., None] * b[t][:, None]
        outputs.append((state @ c[t][..., None])[..., 0] + layer.skip[:, None] * x[t])
    return torch.stack(outputs).flatten(1)


def delta_formula(layer: DeltaNet, mixed: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    heads, size, key_dim = (NUM_GROUPS, NUM_GROUPS, NUM_HEADS), layer.row_size, layer.key_dim
    q, k, v = divided(mixed, heads, (key_dim, key_dim, size))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    a, beta = steps.chunk(2, dim=1)
    decay = torch.exp(layer.decay * torch.nn.functional.softplus(a + layer.step_bias))
    part = layer.most_replaced * beta.sigmoid()
    state = mixed.new_zeros(NUM_HEADS, key_dim, size)
    outputs = []
    for t in range(len(mixed)):
        state = state * decay[t][:, None, None]
        change = part[t][:, None] * (v[t] - (k[t][:, None] @ state)[:, 0])
        state = state + k[t][..., None] * change[:, None]
        outputs.append((q[t][:, None] @ state)[:, 0] / key_dim**0.5)
    return torch.stack(outputs).flatten(1)


@pytest.mark.parametrize(
    "make_layer",
    [
        *MAKERS,
        partial(make_mamba, num_taps=2),
        partial(make_delta_net, num_taps=2),
        partial(make_delta_net, size=16, most_replaced=2),
        partial(make_delta_net, size=64, key_dim=128),
    ],
)
def test_the_outputs_are_those_of_the_formula(make_layer: Callable[[], Layer]) -> None:
    layer = make_layer()
    inputs = make_inputs(layer)
    found = Blocks(layer).run(inputs, [0] * 4, list(LENGTHS))
    for outputs, sequence in zip(found, inputs, strict=True):
        torch.testing.assert_close(outputs.double(), by_formula(layer, sequence), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make_layer", MAKERS)
@pytest.mark.parametrize("seed", range(4))
def test_every_split_gives_the_same_bits(make_layer: Callable[[], Layer], seed: int) -> None:
    """Outputs and all blocks are equal: those of full blocks have the state after their last token."""
    layer, random = make_layer(), Random(seed)
    inputs = make_inputs(layer)
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


@pytest.mark.parametrize("make_layer", MAKERS)
def test_a_state_can_be_continued_from_any_block(make_layer: Callable[[], Layer]) -> None:
    layer = make_layer()
    inputs, blocks = make_inputs(layer), Blocks(layer)
    expected = blocks.run(inputs, [0] * 4, list(LENGTHS))[3]
    for first in range(BLOCK_SIZE, LENGTHS[3], BLOCK_SIZE):
        again = blocks.run(inputs, [*LENGTHS[:3], first], list(LENGTHS))[3]
        assert torch.equal(again, expected[first:])
