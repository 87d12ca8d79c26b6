"""Products in the order of AMX have the bits of the instruction, with tiles and without."""

from __future__ import annotations

import ctypes
import json
import math
import platform
import sys
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import ops
from quire.kernels.cpu.attention import paged_attention
from quire.kernels.cpu.intrinsics import processor_features
from quire.kernels.cpu.products import amx_product, packed_weight, packing
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16, CHAINS, TILES, may_use_tiles
from quire.kernels.cpu.products.linear import linear, sums
from quire.kernels.cpu.products.packed_weight import TiledWeight
from quire.kernels.cpu.products.packing import pack, tiles_are_exact
from quire.kernels.cpu.products.unit_product import ROWS
from tests.kernels.amx_emulator import INSTRUCTIONS, environment
from tests.testing.commands import run_command
from tests.testing.linear_layers import check_rows_and_threads, in_pairs

# --- the instruction ``tdpbf16ps`` in exact arithmetic, as Intel's manual defines it ------------------------

_LEAST, _END = Fraction(2) ** -126, Fraction(2) ** 128
"""The smallest normal float32, and the first power of two that is too large."""


def tile_product(total: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``total + inputs @ weight.T``, 32 inputs at a time.

    Args:
        total: float32 ``[rows, columns]``.
        inputs: bfloat16 ``[rows, in_features]``.
        weight: bfloat16 ``[columns, in_features]``.
    """
    result = torch.empty_like(total)
    for row, values in enumerate(inputs.float().tolist()):
        for column, weights in enumerate(weight.float().tolist()):
            value = _flush(float(total[row, column]))
            for block in range(0, len(values), 32):
                chains = [0.0, 0.0]
                for index in range(block, block + 32):
                    chains[index % 2] = fused(values[index], weights[index], chains[index % 2])
                value = add(value, add(*chains))
            result[row, column] = value
    return result


def add(left: float, right: float) -> float:
    """Return the sum of two float32."""
    return fused(left, 1.0, right)


def fused(left: float, right: float, addend: float) -> float:
    """Return ``left * right + addend`` of float32, rounded once; denormal numbers are zero."""
    left, right, addend = _flush(left), _flush(right), _flush(addend)
    if not all(map(math.isfinite, (left, right, addend))):
        return _with_infinity(left, right, addend)
    exact = Fraction(left) * Fraction(right) + Fraction(addend)
    if exact == 0:
        # The product of two normal float32 is not zero as a Python float either.
        return left * right + addend if addend == 0 else 0.0
    return _nearest(exact)


def _with_infinity(left: float, right: float, addend: float) -> float:
    if math.isfinite(left) and math.isfinite(right):
        return addend
    return left * right + addend


def _nearest(exact: Fraction) -> float:
    """Return the nearest float32 of a number that is not zero, half to even."""
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(size / unit) * unit
    nearest = 0.0 if rounded < _LEAST else math.inf if rounded >= _END else float(rounded)
    return math.copysign(nearest, exact)


def _flush(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < _LEAST else value


# --- tests --------------------------------------------------------------------------------------------------


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal; any two NaN are."""
    is_nan = left.isnan() & right.isnan()
    return bool((is_nan | (left.view(torch.int32) == right.view(torch.int32))).all())


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -9e-39, 1.2e-38, 3e38, -3e38, 1e-20, torch.inf, -torch.inf, torch.nan]


@settings(max_examples=60)
@given(
    num_rows=st.integers(1, 7),
    num_blocks=st.integers(1, 3),
    exponents=st.lists(st.integers(-130, 60), min_size=1, max_size=6),
    special=st.lists(st.sampled_from(SPECIAL), max_size=4),
    seed=st.integers(0, 1 << 20),
)
def test_vectors_have_the_bits_of_the_instruction(
    num_rows: int, num_blocks: int, exponents: list[int], special: list[float], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([2.0**each for each in exponents], dtype=torch.float64)

    def draw(count: int) -> torch.Tensor:
        shape = (count, 32 * num_blocks)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        values *= scales[torch.randint(len(scales), shape, generator=generator)]
        # Half of the values cancel others.
        values[:, 1::4] = -values[:, ::4]
        for each in special:
            values.view(-1)[int(torch.randint(values.numel(), (), generator=generator))] = each
        return values.bfloat16()

    inputs, weight = draw(num_rows), draw(5)
    weight[:, 1::4] = weight[:, ::4].abs()
    packed = pack(weight, AMX_BFLOAT16)
    assert isinstance(packed, TiledWeight)
    expected = tile_product(torch.zeros(num_rows, 5), inputs, weight)
    assert same_bits(sums(inputs, packed, None)[:, :5], expected)


def random_bfloat16(num_rows: int, num_columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_rows, num_columns), generator=generator).bfloat16()


def exp(x: float) -> float:
    """Return ``intrinsics.exp`` of a float32, in exact arithmetic."""
    y = fused(max(x, -87.0), float(np.float32(1.4426950408889634)), 0.0)
    n = math.floor(add(y, 0.5))
    f, p = add(y, -n), 0.0
    for coefficient in (
        1.535336188319500e-4,
        1.339887440266574e-3,
        9.618437357674640e-3,
        5.550332471162809e-2,
        2.402264791363012e-1,
        6.931472028550421e-1,
        1.0,
    ):
        p = fused(p, f, float(np.float32(coefficient)))
    return math.ldexp(p, n)


def attention_of_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the attention of one row over all keys, in the order of ``attention_amx``.

    Args:
        query: bfloat16 ``[head_dim]``, whole tiles.
        keys, values: bfloat16 ``[num_keys, head_dim]``.
    """
    best, weight, total = -1e30, 0.0, torch.zeros(1, len(query))
    for first in range(0, len(keys), 64):
        scores = tile_product(torch.zeros(1, 64), query[None], _padded(keys[first : first + 64]))[0].tolist()
        scores = [fused(score, scale, 0.0) for score in scores[: len(keys) - first]]
        peak = max(best, *scores)
        shrink = exp(add(best, -peak))
        weights = torch.zeros(1, 64, dtype=torch.bfloat16)
        weights[0, : len(scores)] = torch.tensor([exp(add(score, -peak)) for score in scores])
        best, weight = peak, fused(weight, shrink, 0.0)
        for each in weights[0].tolist():
            weight = add(weight, each)
        total = tile_product(total * shrink, weights, _padded(values[first : first + 64]).T)
    return total[0] * (torch.tensor(1.0) / torch.tensor(weight))


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, 64 - len(rows)))


def test_attention_has_the_bits_of_the_instruction() -> None:
    num_tokens, head_dim = 75, 32
    generator = torch.Generator().manual_seed(10)
    query, keys, values = (
        torch.randn((3, num_tokens, 1, head_dim), generator=generator)
        * torch.tensor([3.0, 2.0, 1e-3]).view(3, 1, 1, 1)
    ).bfloat16()
    blocks = torch.full((7, 2, 1, 16, head_dim), torch.nan, dtype=torch.bfloat16)
    table = torch.tensor([[5, 2, 0, 6, 3]], dtype=torch.int32)
    slots = (table[0][:, None] * 16 + torch.arange(16)).flatten()[:num_tokens].long()
    ops.write_kv(keys, values, blocks, slots)
    starts, lengths = (
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
    )
    found = paged_attention(query.float(), blocks, table, starts, lengths, scale=0.3, arithmetic=AMX_BFLOAT16)
    for row in (0, 1, 15, 40, 63, 64, 74):
        seen = slice(row + 1)
        expected = attention_of_row(query[row, 0], keys[seen, 0], values[seen, 0], float(np.float32(0.3)))
        assert torch.equal(found[row, 0], expected), row


@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (130, 96), (192, 2080)])
def test_bits_do_not_depend_on_other_rows_or_on_threads(out_features: int, in_features: int) -> None:
    packed = pack(random_bfloat16(out_features, in_features, seed=1), AMX_BFLOAT16)
    check_rows_and_threads(lambda inputs: linear(inputs, packed, None), in_features, torch.bfloat16)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_partial_sums_of_ranks_add_up_to_the_same_bits(num_ranks: int) -> None:
    weight, inputs = random_bfloat16(70, 512, seed=3), random_bfloat16(5, 512, seed=4)
    size = 512 // num_ranks
    parts = [
        sums(
            inputs[:, first : first + size],
            pack(weight[:, first : first + size], AMX_BFLOAT16),
            None,
            8 // num_ranks,
        )
        for first in range(0, 512, size)
    ]
    whole, packed = in_pairs(parts), pack(weight, AMX_BFLOAT16)
    assert torch.equal(whole, sums(inputs, packed, None, 8))
    assert not torch.equal(whole, sums(inputs, packed, None, 1))
    own = sums(inputs, packed, None, 1, range(64, 128))
    assert torch.equal(own, sums(inputs[:, 64:128], pack(weight[:, 64:128], AMX_BFLOAT16), None))


def test_packing_loses_nothing() -> None:
    weight = random_bfloat16(130, 96, seed=5)
    packed = pack(weight, AMX_BFLOAT16)
    rows = torch.tensor([[0, 129], [64, 3]])
    assert torch.equal(packed.unpack(), weight)
    assert torch.equal(packed.rows(rows), weight[rows])


def test_weights_without_whole_tiles_keep_the_order_of_the_inputs() -> None:
    assert not isinstance(pack(random_bfloat16(64, 48, seed=6), AMX_BFLOAT16), TiledWeight)
    assert not isinstance(pack(torch.ones(64, 64), AMX_BFLOAT16), TiledWeight)
    assert not isinstance(pack(random_bfloat16(64, 64, seed=6)), TiledWeight)


def test_vectors_replace_tiles_that_linux_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing:
        def syscall(self, *_: int) -> int:
            return -1

    monkeypatch.setattr(amx_product, "processor_features", lambda: {"amx-tile": True, "amx-bf16": True})
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    monkeypatch.setattr(packing, "may_use_tiles", may_use_tiles.__wrapped__)
    monkeypatch.setattr(packing, "tiles_are_exact", tiles_are_exact.__wrapped__)
    packed = pack(random_bfloat16(64, 64, seed=7), AMX_BFLOAT16)
    assert isinstance(packed, TiledWeight)
    assert not packed.by_tiles
    assert "permits no AMX tiles" in caplog.text


@pytest.mark.parametrize(
    ("may_use", "stored", "dtype"), [(True, TILES, "bfloat16"), (False, CHAINS, "float32")]
)
def test_each_process_asks_for_tiles_before_it_multiplies_a_weight_that_another_one_packed(
    monkeypatch: pytest.MonkeyPatch, may_use: bool, stored: object, dtype: str
) -> None:
    packed = pack(random_bfloat16(64, 64, seed=7), AMX_BFLOAT16)
    assert isinstance(packed, TiledWeight)
    mapped = replace(packed, by_tiles=True)
    monkeypatch.setattr(packed_weight, "may_use_tiles", lambda: may_use)
    assert mapped.stored is stored
    assert mapped.operands(random_bfloat16(2, 64, seed=8)).dtype is getattr(torch, dtype)


def test_vectors_replace_tiles_that_round_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def other_bits(inputs: torch.Tensor, weight: TiledWeight, bias: None) -> torch.Tensor:
        result = sums(inputs, replace(weight, by_tiles=False), bias)
        result[-1, -1] += float(weight.by_tiles) * result[-1, -1].abs() / 2**20
        return result

    monkeypatch.setattr(packing, "may_use_tiles", lambda: True)
    monkeypatch.setattr(packing, "sums", other_bits)
    assert not tiles_are_exact.__wrapped__()
    assert "do not round as its manual says" in caplog.text


_has_tiles = processor_features().get("amx-tile", False) and processor_features().get("amx-bf16", False)


@pytest.mark.skipif(_has_tiles, reason="this processor has AMX, so nothing traps")
@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="the handler is for Linux on x86-64",
)
def test_machine_code_with_tiles_has_the_bits_of_vectors_if_its_instructions_are_emulated() -> None:
    command = sys.executable, "-m", "tests.kernels.amx_emulator"
    done = run_command(*command, variables=environment(), timeout=1800)
    counts = json.loads(done.stdout)
    *met, faults = counts["met"]
    assert faults == 0
    assert all(count > 0 for count in met), dict(zip(INSTRUCTIONS, met, strict=True))
    products, attention = (dict(zip(INSTRUCTIONS, each, strict=True)) for each in counts["written"])
    assert all(products.values()), products
    assert {name for name, count in attention.items() if count} == set(INSTRUCTIONS) - {"tdpbusd"}, attention


@pytest.mark.skipif(
    not _has_tiles, reason="this processor has no AMX for bfloat16 (amx_bf16 in /proc/cpuinfo)"
)
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 33, ROWS + 5])
def test_the_instruction_itself_has_the_bits_of_the_model(num_rows: int) -> None:
    inputs, weight = random_bfloat16(num_rows, 64, seed=8), random_bfloat16(20, 64, seed=9)
    inputs[0, :3] = torch.tensor([1e-40, torch.inf, torch.nan])
    packed = pack(weight, AMX_BFLOAT16)
    assert isinstance(packed, TiledWeight)
    assert packed.by_tiles
    expected = tile_product(torch.zeros(num_rows, 20), inputs, weight)
    assert same_bits(sums(inputs, packed, None)[:, :20], expected)
