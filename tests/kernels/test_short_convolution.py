"""The sums of short convolutions over blocks, compared with torch's convolution in float64."""

from __future__ import annotations

from random import Random

import pytest
import torch

from quire.kernels import ops
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.short_convolution import Convolution, short_convolution

BLOCK_SIZE, NUM_HEADS, HEAD_DIM, NUM_BLOCKS = 4, 4, 8, 24
LENGTHS = (1, 2, 9, 23)


class Blocks:
    """Blocks in which each sequence has a random table; what is not written is not a number."""

    def __init__(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> None:
        size = (NUM_BLOCKS, 2, NUM_HEADS // 2, BLOCK_SIZE, HEAD_DIM)
        self.kv = torch.full(size, float("nan"), dtype=dtype)
        self.scales = None
        if kv_dtype is not None:
            self.kv, self.scales = torch.zeros(size, dtype=kv_dtype), torch.zeros(size[:3])
        self.tables = torch.randperm(NUM_BLOCKS, dtype=torch.int32).view(len(LENGTHS), -1)

    def run(
        self,
        inputs: list[torch.Tensor],
        convolution: Convolution,
        firsts: list[int],
        ends: list[int],
        pad: int = 0,
    ) -> list[torch.Tensor]:
        """Run a step with the tokens from ``firsts`` to ``ends``; ``pad`` tokens of no sequence follow."""
        lengths = [end - first for first, end in zip(firsts, ends, strict=True)]
        new = [each[first:end] for each, first, end in zip(inputs, firsts, ends, strict=True)]
        slots = [
            int(table[at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE
            for table, first, end in zip(self.tables, firsts, ends, strict=True)
            for at in range(first, end)
        ]
        packed = torch.cat([*new, inputs[0].new_zeros(pad, NUM_HEADS, HEAD_DIM)])
        metadata = AttentionMetadata(
            block_tables=torch.cat([self.tables, torch.zeros_like(self.tables[:1]).expand(pad, -1)]),
            query_starts=torch.tensor([0, *lengths, *[0] * pad]).cumsum(0).int(),
            seq_lens=torch.tensor([*ends, *[0] * pad], dtype=torch.int32),
            slot_mapping=torch.tensor([*slots, *[-1] * pad], dtype=torch.long),
        )
        key, value = packed.chunk(2, dim=1)
        ops.write_kv(key, value, self.kv, metadata.slot_mapping, self.scales)
        output = short_convolution(packed, self.kv, metadata, convolution, self.scales)
        return list(output.split([*lengths, pad]))[: len(lengths)]


def make_inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(length, NUM_HEADS, HEAD_DIM).to(dtype) for length in LENGTHS]


def make_convolution(
    num_taps: int, dtype: torch.dtype = torch.float32, *, has_bias: bool = True
) -> Convolution:
    bias = torch.randn(NUM_HEADS, HEAD_DIM).to(dtype) if has_bias else None
    return Convolution(torch.randn(num_taps, NUM_HEADS, HEAD_DIM).to(dtype), bias)


def whole(inputs: list[torch.Tensor], convolution: Convolution) -> list[torch.Tensor]:
    """Return what torch's convolution gives for each whole sequence."""
    taps, bias = convolution
    num_channels = NUM_HEADS * HEAD_DIM
    weight = taps.double().flatten(1).T[:, None]
    results = []
    for each in inputs:
        padded = torch.nn.functional.pad(each.double().flatten(1).T, (len(taps) - 1, 0))
        flat = None if bias is None else bias.double().flatten()
        output = torch.nn.functional.conv1d(padded[None], weight, flat, groups=num_channels)
        results.append(output[0].T.unflatten(1, (NUM_HEADS, HEAD_DIM)))
    return results


@pytest.mark.parametrize("num_taps", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torchs_convolution(dtype: torch.dtype, num_taps: int) -> None:
    torch.manual_seed(num_taps)
    inputs, convolution = make_inputs(dtype), make_convolution(num_taps, dtype, has_bias=num_taps != 3)
    found = Blocks(dtype).run(inputs, convolution, [0] * len(LENGTHS), list(LENGTHS))
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for each, expected in zip(found, whole(inputs, convolution), strict=True):
        torch.testing.assert_close(each.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_the_bits_do_not_depend_on_how_sequences_are_cut(kv_dtype: torch.dtype | None, seed: int) -> None:
    torch.manual_seed(seed)
    random = Random(seed)
    inputs, convolution = make_inputs(torch.bfloat16), make_convolution(3, torch.bfloat16)
    expected = Blocks(torch.bfloat16, kv_dtype).run(inputs, convolution, [0] * len(LENGTHS), list(LENGTHS))
    blocks, firsts = Blocks(torch.bfloat16, kv_dtype), [0] * len(LENGTHS)
    parts: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    while firsts != list(LENGTHS):
        ends = [
            min(random.randint(first, first + 5), end) for first, end in zip(firsts, LENGTHS, strict=True)
        ]
        for part, new in zip(parts, blocks.run(inputs, convolution, firsts, ends), strict=True):
            part.append(new)
        firsts = ends
    assert all(torch.equal(torch.cat(part), each) for part, each in zip(parts, expected, strict=True))


def test_8_bit_inputs_are_rounded() -> None:
    torch.manual_seed(0)
    inputs, convolution = make_inputs(torch.float32), make_convolution(3)
    blocks = Blocks(torch.float32, torch.float8_e4m3fn)
    found = blocks.run(inputs, convolution, [0] * len(LENGTHS), list(LENGTHS))
    for each, expected in zip(found, whole(inputs, convolution), strict=True):
        assert (each - expected).norm() < 0.05 * expected.norm()


def test_tokens_of_no_sequence_read_memory_that_exists() -> None:
    torch.manual_seed(0)
    inputs, convolution = make_inputs(torch.float32), make_convolution(3)
    ends = list(LENGTHS)
    expected = Blocks(torch.float32).run(inputs, convolution, [0] * len(LENGTHS), ends)
    found = Blocks(torch.float32).run(inputs, convolution, [0] * len(LENGTHS), ends, pad=40)
    assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
