"""Linear attention and selective scans over states in blocks, compared with their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.states import States, StateShape, with_states
from quire.kernels.cpu.linear_attention import Decay, LinearAttention
from quire.kernels.cpu.selective_scan import SelectiveScan
from quire.kernels.metadata import AttentionMetadata
from quire.kvindex.kv_layout import KvShape

BLOCK_SIZE, NUM_HEADS, NUM_GROUPS = 8, 4, 2
LENGTHS = (1, 2, 9, 37)
NUM_BLOCKS = 5


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_layer(
    num_taps: int = 4,
    size: int = 48,
    key_dim: int = 24,
    decay: Decay = Decay.SOFTPLUS,
    num_decays: int = 1,
    most_replaced: int = 1,
) -> LinearAttention:
    num_channels = 2 * NUM_GROUPS * key_dim + NUM_HEADS * size
    return LinearAttention(
        taps=torch.randn(num_taps, num_channels) if num_taps else None,
        conv_bias=torch.randn(num_channels) if num_taps else None,
        decay=decay,
        rates=-torch.rand(NUM_HEADS),
        step_bias=torch.randn(NUM_HEADS, num_decays),
        skip=torch.zeros(NUM_HEADS) if most_replaced else torch.randn(NUM_HEADS),
        num_key_heads=NUM_GROUPS,
        key_dim=key_dim,
        row_size=size,
        most_replaced=most_replaced,
    )


def make_scan(num_taps: int = 4, num_channels: int = 96, key_dim: int = 8) -> SelectiveScan:
    def select(inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute nothing whose bits might depend on other tokens."""
        return inputs.roll(1, dims=1), inputs[:, :key_dim] * 0.5, inputs[:, -key_dim:]

    rates, skip = -torch.rand(key_dim, num_channels), torch.randn(num_channels)
    taps, bias = torch.randn(num_taps, num_channels), torch.randn(num_channels)
    return SelectiveScan(taps, bias, rates, skip, select)


make_mamba = partial(make_layer, most_replaced=0)
make_kimi = partial(make_layer, num_decays=24)
make_bounded = partial(make_layer, num_decays=24, decay=Decay.SIGMOID)
make_lightning = partial(make_layer, num_taps=0, decay=Decay.FIXED, most_replaced=0)
Layer = LinearAttention | SelectiveScan
MakeLayer = Callable[[], Layer]
MAKERS: list[MakeLayer] = [make_layer, make_mamba, make_kimi, make_bounded, make_lightning, make_scan]


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
        new, steps = packed.split([num_channels(self.layer), num_steps(self.layer)], dim=1)
        output = self.layer.advance(new, steps, metadata, self.states.places(1))
        parts = iter(output.split(lengths))
        return [next(parts) if row in rows else output[:0] for row in range(len(firsts))]

    def block(self, sequence: int, index: int) -> bytes:
        return self.memory.read(int(self.tables[sequence, index]))


def num_channels(layer: Layer) -> int:
    if isinstance(layer, SelectiveScan):
        return layer.num_outputs
    return 2 * NUM_GROUPS * layer.key_dim + layer.num_outputs


def num_steps(layer: Layer) -> int:
    if isinstance(layer, SelectiveScan):
        return 0
    of_decays = 0 if layer.decay is Decay.FIXED else layer.step_bias.numel()
    return of_decays + (NUM_HEADS if layer.most_replaced else 0)


def make_inputs(layer: Layer) -> list[torch.Tensor]:
    return [torch.randn(length, num_channels(layer) + num_steps(layer)) for length in LENGTHS]


def by_formula(layer: Layer, inputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one sequence, in float64."""
    mixed, steps = inputs.double().split([num_channels(layer), num_steps(layer)], dim=1)
    if layer.taps is not None and layer.conv_bias is not None:
        padded = torch.cat([mixed.new_zeros(len(layer.taps) - 1, num_channels(layer)), mixed])
        mixed = torch.nn.functional.silu(
            sum(tap * padded[j : j + len(mixed)] for j, tap in enumerate(layer.taps.double()))
            + layer.conv_bias.double()
        )
    if isinstance(layer, SelectiveScan):
        return scanned(layer, mixed)
    q, k, v = divided(mixed, layer)
    of_decays = len(mixed), *layer.step_bias.shape
    if layer.decay is Decay.FIXED:
        biased = mixed.new_ones(of_decays)
        strength = biased
    else:
        biased = steps[:, : layer.step_bias.numel()].view(of_decays) + layer.step_bias
        strength = biased.sigmoid() if layer.decay is Decay.SIGMOID else torch.nn.functional.softplus(biased)
    decay = torch.exp(layer.rates[:, None] * strength)[..., None]
    part = layer.most_replaced * steps[:, steps.shape[1] - NUM_HEADS :].sigmoid()
    if layer.most_replaced:
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        q = q / layer.key_dim**0.5
    state = mixed.new_zeros(NUM_HEADS, layer.key_dim, layer.row_size)
    outputs = []
    for t in range(len(mixed)):
        state = state * decay[t]
        if layer.most_replaced:
            change = part[t][:, None] * (v[t] - (k[t][:, None] @ state)[:, 0])
        else:
            change = v[t] * strength[t]
        state = state + k[t][..., None] * change[:, None]
        outputs.append((q[t][:, None] @ state)[:, 0] + layer.skip[:, None] * v[t])
    return torch.stack(outputs).flatten(1)


def scanned(layer: SelectiveScan, mixed: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a selective scan of mixed inputs, in float64."""
    steps, b, c = layer.select(mixed)
    steps = torch.nn.functional.softplus(steps)
    state = mixed.new_zeros(layer.rates.shape)
    outputs = []
    for t in range(len(mixed)):
        state = torch.exp(layer.rates * steps[t]) * state + b[t][:, None] * (steps[t] * mixed[t])
        outputs.append(c[t] @ state + layer.skip * mixed[t])
    return torch.stack(outputs)


def divided(mixed: torch.Tensor, layer: LinearAttention) -> list[torch.Tensor]:
    """Return queries, keys and values by heads; those of groups are repeated."""
    numbers, sizes = (NUM_GROUPS, NUM_GROUPS, NUM_HEADS), (layer.key_dim, layer.key_dim, layer.row_size)
    parts = mixed.split([number * size for number, size in zip(numbers, sizes, strict=True)], dim=1)
    return [
        part.view(len(mixed), number, size).repeat_interleave(NUM_HEADS // number, dim=1)
        for part, number, size in zip(parts, numbers, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    "make",
    [
        *MAKERS,
        partial(make_mamba, num_taps=2, size=16, key_dim=128),
        partial(make_layer, num_taps=1),
        partial(make_scan, num_taps=2, num_channels=256, key_dim=16),
        partial(make_layer, size=16, most_replaced=2),
        partial(make_layer, size=64, key_dim=128),
        partial(make_kimi, size=16, key_dim=128, num_decays=128),
    ],
)
def test_the_outputs_are_those_of_the_formula(make: MakeLayer) -> None:
    layer = make()
    inputs = make_inputs(layer)
    found = Blocks(layer).run(inputs, [0] * 4, list(LENGTHS))
    for outputs, sequence in zip(found, inputs, strict=True):
        torch.testing.assert_close(outputs.double(), by_formula(layer, sequence), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("seed", range(4))
def test_every_split_gives_the_same_bits(make: MakeLayer, seed: int) -> None:
    """Outputs and all blocks are equal: those of full blocks have the state after their last token."""
    layer, random = make(), Random(seed)
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


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_can_be_continued_from_any_block(make: MakeLayer) -> None:
    layer = make()
    inputs, blocks = make_inputs(layer), Blocks(layer)
    expected = blocks.run(inputs, [0] * 4, list(LENGTHS))[3]
    for first in range(BLOCK_SIZE, LENGTHS[3], BLOCK_SIZE):
        again = blocks.run(inputs, [*LENGTHS[:3], first], list(LENGTHS))[3]
        assert torch.equal(again, expected[first:])
