"""Products of integers of 8 or 4 bits on the CPU: exact sums, by every instruction."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import binding, ir
from numba import from_dtype, njit

from quire.kernels.cpu.intrinsics import GROUP, TILE_COLUMNS
from quire.kernels.cpu.products import amx_product, integer_weight
from quire.kernels.cpu.products.amx_product import INTEGER_FEATURES, INTEGER_TILES, may_use_tiles
from quire.kernels.cpu.products.group_product import (
    GROUP_CODINGS,
    NIBBLES,
    OPERAND_BYTES,
    Q4,
    Q4_OFFSET,
    Q6_HALVES,
    Q6_OFFSET,
    Q8,
    SCALE_FACTOR,
    emit_code_products,
    emit_end,
    emit_nibbles,
    emit_start,
    encode_groups,
)
from quire.kernels.cpu.products.group_weight import GroupWeight, pack_groups
from quire.kernels.cpu.products.integer_product import (
    INPUT_BYTES,
    INTEGERS,
    MOST_INPUTS,
    ROW_HEADER,
    Instruction,
    emit_integer_products,
    encode_integers,
    integer_instruction,
)
from quire.kernels.cpu.products.integer_weight import quantize_to_integers
from quire.kernels.cpu.products.linear import linear, sums
from quire.kernels.cpu.products.packed_weight import UNIT, PackedWeight
from quire.kernels.cpu.products.quantized_weight import quantize
from quire.kernels.cpu.products.unit_product import ROWS
from tests.testing.linear_layers import check_rows_and_threads

HASWELL = "avx2 fma f16c"
SKYLAKE = f"{HASWELL} avx512f avx512bw avx512dq avx512vl"
VNNI = f"{SKYLAKE} avx512vnni"
AMX = "amx-tile amx-int8 amx-bf16"
PROCESSORS: dict[str, tuple[str, str, tuple[Instruction, int]]] = {
    "Sandy Bridge": ("sandybridge", "avx", ("vpmulld", 8)),
    "Haswell": ("haswell", HASWELL, ("vpmaddwd", 8)),
    "Alder Lake": ("alderlake", f"{HASWELL} avxvnni", ("vpdpbusd", 8)),
    "Sierra Forest": ("sierraforest", f"{HASWELL} avxvnni avxvnniint8", ("vpdpbusd", 8)),
    "Skylake-X": ("skylake-avx512", SKYLAKE, ("vpmaddwd", 16)),
    "Zen 4": ("znver4", f"{VNNI} avx512bf16", ("vpdpbusd", 16)),
    "Zen 5": ("znver5", f"{VNNI} avx512bf16 avxvnni", ("vpdpbusd", 16)),
    "Sapphire Rapids": ("sapphirerapids", f"{VNNI} avx512bf16 avxvnni {AMX}", ("vpdpbusd", 16)),
    "Diamond Rapids": ("diamondrapids", f"{VNNI} avx512bf16 avxvnni avxvnniint8 {AMX}", ("vpdpbusd", 16)),
}
"""LLVM's name of each processor, its features that matter here, and how it multiplies integers."""
INSTRUCTIONS: list[tuple[Instruction, int, str]] = [
    ("vpdpbusd", 16, "avx512vnni"),
    ("vpdpbusd", 8, "avxvnni"),
    ("vpmaddwd", 16, "avx512bw"),
    ("vpmaddwd", 8, "avx2"),
    ("vpmulld", 8, "avx"),
]
"""The instructions, their lanes, and the features that they need."""
PRODUCTS: dict[str, Any] = {
    "out_features": st.integers(1, 200),
    "num_groups": st.integers(1, 40),
    "num_rows": st.integers(1, ROWS + 7),
    "outlier": st.sampled_from([0.0, 1.0, 1e4]),
    "seed": st.integers(0, 1000),
}
"""Sizes and values of products that are compared with exact ones."""
CODINGS = [Q4, Q4_OFFSET, Q6_OFFSET, Q6_HALVES, Q8]


def pack_as(weight: torch.Tensor, coding: Any) -> GroupWeight:
    """Quantize a weight; each group has as small and as large codes as the coding has."""
    facts = GROUP_CODINGS[from_dtype(coding)]
    groups = weight.unflatten(1, (-1, facts.per_scale))
    least = groups.amin(-1, keepdim=True)
    if not facts.has_offsets:
        least = -facts.zero * (groups.abs().amax(-1, keepdim=True) / min(facts.zero, facts.most - facts.zero))
    steps = (groups - least).amax(-1, keepdim=True) / facts.most
    steps = least / -facts.zero if facts.zero else steps
    codes = ((groups - least) / torch.where(steps == 0, 1, steps)).round().clamp(0, facts.most)
    offsets = least.flatten(1) if facts.has_offsets else None
    packed = pack_groups(
        codes.flatten(1).to(torch.uint8), steps.flatten(1), offsets, coding, None, weight.dtype
    )
    assert packed is not None
    return packed


PACKS = [
    quantize_to_integers,
    partial(quantize, weight_dtype="w4a8"),
    *(partial(pack_as, coding=each) for each in CODINGS),
]


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_instruction_of_a_processor(name: str) -> None:
    _, features, expected = PROCESSORS[name]
    assert integer_instruction(dict.fromkeys(features.split(), True)) == expected


@pytest.mark.parametrize("name", PROCESSORS)
def test_which_processors_multiply_integers_by_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Permitting:
        def syscall(self, *_: int) -> int:
            return 0

    monkeypatch.setattr(
        amx_product, "processor_features", lambda: dict.fromkeys(PROCESSORS[name][1].split(), True)
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Permitting())
    assert may_use_tiles.__wrapped__(INTEGER_FEATURES) == name.endswith("Rapids")


@pytest.mark.parametrize(("permitted", "stored"), [({INTEGER_FEATURES}, INTEGER_TILES), (set(), INTEGERS)])
def test_each_process_asks_for_tiles_before_it_multiplies_integers_that_another_one_packed(
    monkeypatch: pytest.MonkeyPatch, permitted: set[frozenset[str]], stored: object
) -> None:
    mapped = replace(quantize_to_integers(torch.ones(64, 64)), by_tiles=True)
    monkeypatch.setattr(integer_weight, "may_use_tiles", permitted.__contains__)
    assert mapped.stored is stored


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instructions of x86")
@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "Sandy Bridge"])
def test_the_machine_code_of_a_processor(name: str) -> None:
    """LLVM selects each instruction in the form that the processor can execute."""
    processor, _, (instruction, lanes) = PROCESSORS[name]
    machine = binding.Target.from_default_triple().create_target_machine(cpu=processor)
    assembly = machine.emit_assembly(binding.parse_assembly(str(product_module(instruction, lanes))))
    found = [line for line in assembly.splitlines() if instruction in line]
    assert len(found) == (1 if instruction == "vpdpbusd" else 2)
    registers = "zmm" if lanes == 16 else "ymm"
    assert all(registers in line for line in found)
    # Without AVX-512 the instruction exists only with the prefix VEX.
    is_vex = [line.split()[0] == "{vex}" for line in found]
    assert is_vex == [instruction == "vpdpbusd" and lanes == 8] * len(found)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are instructions of x86")
@pytest.mark.parametrize("most", [15, 63, 255])
@pytest.mark.parametrize("name", [name for name in PROCESSORS if name != "Sandy Bridge"])
def test_the_machine_code_of_codes_in_groups(name: str, most: int) -> None:
    processor, _, (instruction, lanes) = PROCESSORS[name]
    machine = binding.Target.from_default_triple().create_target_machine(cpu=processor)
    module = product_module(instruction, lanes, partial(add_code_products, most=most))
    lines = machine.emit_assembly(binding.parse_assembly(str(module))).splitlines()
    expected = {"vpmaddubsw": 2, "vpmaddwd": 1} if most < 64 else {"vpmaddubsw": 0, "vpmaddwd": 4}
    if instruction == "vpdpbusd":
        expected = {"vpdpbusd": 2}
    for found, count in expected.items():
        products = [line for line in lines if found in line]
        assert len(products) == count
        assert all(("zmm" if lanes == 16 else "ymm") in line for line in products)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Alder Lake is an x86")
@pytest.mark.parametrize(
    "stored", ["integer_product.INTEGERS", "group_product.NIBBLES", "group_product.Q6_HALVES"]
)
def test_the_kernel_of_a_processor_with_vnni_but_without_avx512(tmp_path: Path, stored: str) -> None:
    program = f"""
from llvmlite import binding
from numba import njit

features = dict.fromkeys("{PROCESSORS["Alder Lake"][1]}".split(), True)
binding.get_host_cpu_features = lambda: features
from quire.kernels.cpu.products import group_product, integer_product
from quire.kernels.cpu.products.linear import unit_kernel

print(unit_kernel({stored})._library.get_asm_str())
"""
    environment = {
        "NUMBA_CACHE_DIR": str(tmp_path),
        "NUMBA_CPU_NAME": "alderlake",
        "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma,+f16c,+avxvnni",
    }
    assembly = subprocess.check_output(
        [sys.executable, "-c", program], env={**os.environ, **environment}, text=True
    )
    products = [line.split() for line in assembly.splitlines() if "vpdpbusd" in line]
    assert products
    assert {line[0] for line in products} == {"{vex}"}
    assert not re.search(r"zmm|vpmaddwd", assembly)


def expected_products(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the products of quantized inputs and weights, whose sums are in 64 bits."""
    peaks, largest = inputs.abs().amax(1, keepdim=True), weight.abs().amax(1)
    scales = largest / 127
    integers = (weight / torch.where(scales > 0, scales, 1)[:, None]).round().clamp(-127, 127).long()
    rows = (inputs * torch.where(peaks > 0, torch.full_like(peaks, 127) / peaks, 0)).round().long()
    return (rows @ integers.T).float() * ((peaks / 127) * scales)


@settings(max_examples=40)
@given(**PRODUCTS)
def test_products_are_exact(
    out_features: int, num_groups: int, num_rows: int, outlier: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((out_features, 32 * num_groups), generator=generator)
    inputs = torch.randn((num_rows, 32 * num_groups), generator=generator)
    inputs[0] *= outlier
    inputs[-1, 0] += outlier
    packed = quantize_to_integers(weight)
    assert torch.equal(sums(inputs, packed, None)[:, :out_features], expected_products(inputs, weight))
    assert torch.equal(sums(inputs, packed, None, num_segments=8), sums(inputs, packed, None))


def expected_groups(inputs: torch.Tensor, packed: GroupWeight) -> torch.Tensor:
    """Return the products of codes in groups: scales are used in order, each with one rounding."""
    coding = GROUP_CODINGS[from_dtype(packed.coding)]
    half = torch.bfloat16 if packed.coding == NIBBLES else torch.float16
    factors = packed.panels[..., coding.code_bytes :].view(half).unflatten(-1, (-1, TILE_COLUMNS))
    # [outputs, groups, scales and perhaps an offset]
    factors = factors.permute(0, 3, 1, 2).flatten(0, 1)[: packed.out_features].float()
    scales, offsets = factors.split([GROUP // coding.per_scale, int(coding.has_offsets)], dim=-1)
    weight = packed.unpack().unflatten(1, (-1, GROUP))
    if coding.has_offsets:
        weight = weight - offsets / SCALE_FACTOR
    steps = (scales / SCALE_FACTOR).repeat_interleave(coding.per_scale, -1)
    integers = (weight / torch.where(steps == 0, 1, steps)).round().long()
    rows = inputs.unflatten(1, (-1, GROUP))
    peaks = rows.abs().amax(-1, keepdim=True)
    row_factors = torch.where(peaks > 0, torch.full_like(peaks, 127) / peaks, 0)
    rounded, row_scales = (rows * row_factors).round().long(), peaks[..., 0] / 127 / SCALE_FACTOR
    total = torch.zeros(len(inputs), packed.out_features)
    for group in range(rows.shape[1]):
        scale = row_scales[:, group, None]
        for number in range(GROUP // coding.per_scale):
            own = slice(number * coding.per_scale, (number + 1) * coding.per_scale)
            exact = (rounded[:, group, own] @ integers[:, group, own].T).double()
            both = scale * scales[None, :, group, number]
            total = (exact * both.double() + total.double()).float()
        if coding.has_offsets:
            sums_of_rows = rounded[:, group].sum(-1, keepdim=True).float() * scale
            total = (sums_of_rows.double() * offsets[:, group, 0].double() + total.double()).float()
    return total


@settings(max_examples=60)
@given(**PRODUCTS, pack=st.sampled_from(PACKS[1:]))
def test_products_of_codes_are_exact_within_a_group(
    out_features: int, num_groups: int, num_rows: int, outlier: float, seed: int, pack: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn((out_features, GROUP * num_groups), generator=generator)
    weight[-1] = 0.0
    inputs = torch.randn((num_rows, GROUP * num_groups), generator=generator)
    inputs[0] *= outlier
    inputs[-1, 0] += outlier
    packed = pack(weight)
    assert torch.equal(sums(inputs, packed, None)[:, :out_features], expected_groups(inputs, packed))


def test_segments_of_products_of_four_bits_are_added_in_a_tree() -> None:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn((7, 8 * GROUP), generator=generator)
    packed = quantize(torch.randn((70, 8 * GROUP), generator=generator), "w4a8")
    whole = sums(inputs, packed, None, 4)
    quarters = [sums(inputs, packed, None, 1, range(first, first + 2 * GROUP)) for first in range(0, 256, 64)]
    assert torch.equal((quarters[0] + quarters[1]) + (quarters[2] + quarters[3]), whole)
    assert torch.equal(sums(inputs, packed, None, 2, range(0, 4 * GROUP)), quarters[0] + quarters[1])


@pytest.mark.parametrize("num_rows", [1, 2, 6, 7])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_sums_of_a_group_do_not_overflow(num_rows: int, sign: float) -> None:
    """Each product has the largest magnitude: that of 127 and the unsigned weight 15 or 0."""
    inputs = torch.full((num_rows, 2 * GROUP), 127.0 * sign)
    weight = torch.tensor([7.0, -8.0]).repeat(5)[:, None].repeat(1, 2 * GROUP)
    assert torch.equal(sums(inputs, quantize(weight, "w4a8"), None)[:, :10], inputs @ weight.T)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_codes_of_a_coding_do_not_overflow(coding: Any, sign: float) -> None:
    facts = GROUP_CODINGS[from_dtype(coding)]
    codes = torch.tensor([facts.most, 0], dtype=torch.uint8).repeat(5)[:, None].repeat(1, 2 * GROUP)
    ones = torch.ones((10, 2 * GROUP // facts.per_scale))
    offsets = torch.ones((10, 2)) if facts.has_offsets else None
    packed = pack_groups(codes, ones, offsets, coding, None, torch.float32)
    assert packed is not None
    inputs = torch.full((7, 2 * GROUP), 127.0 * sign)
    for num_rows in (1, 2, 7):
        assert torch.equal(
            sums(inputs[:num_rows], packed, None)[:, :10], inputs[:num_rows] @ packed.unpack().T
        )


def test_a_scale_beyond_float16_is_not_packed() -> None:
    codes = torch.zeros((1, GROUP), dtype=torch.uint8)
    for scale, is_packed in ((255.0, True), (256.0, False), (torch.nan, False)):
        packed = pack_groups(codes, torch.full((1, 1), scale), None, Q4, None, torch.float32)
        assert (packed is not None) == is_packed


@pytest.mark.parametrize("num_rows", [1, 2, 6, 7])
def test_the_sums_of_the_most_inputs_do_not_overflow(num_rows: int) -> None:
    """All products have the largest magnitude. Sums of unsigned inputs reach 255 * 127 * ``MOST_INPUTS``."""
    largest = 127.0
    alternating = torch.tensor([largest, -largest]).repeat(MOST_INPUTS // 2)
    patterns = torch.stack(
        [torch.full((MOST_INPUTS,), largest), torch.full((MOST_INPUTS,), -largest), alternating]
    )
    products = sums(patterns.repeat(3, 1)[:num_rows], quantize_to_integers(patterns), None)[:, :3]
    expected = (patterns.double() @ patterns.double().T).repeat(3, 1)[:num_rows]
    assert expected.abs().max() == 127 * 127 * MOST_INPUTS
    assert torch.equal(products.double(), expected.float().double())


@pytest.mark.parametrize("pack", PACKS)
def test_bits_do_not_depend_on_other_rows_or_on_threads(pack: Callable[[torch.Tensor], PackedWeight]) -> None:
    generator = torch.Generator().manual_seed(1)
    packed = pack(torch.randn((320, 96), generator=generator))
    bias = torch.randn(packed.num_units * UNIT, generator=generator)
    check_rows_and_threads(lambda inputs: linear(inputs, packed, bias), 96)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_spoils_its_row_only(
    value: float, pack: Callable[[torch.Tensor], PackedWeight]
) -> None:
    inputs = torch.ones((3, 32))
    inputs[1, 7] = value
    packed = pack(torch.ones((5, 32)))
    products = linear(inputs, packed, None)
    assert products[1].isnan().all()
    # The steps of the other codings have no float16 that makes them exactly 1.
    expected = torch.full((5,), 32.0) if pack in PACKS[:2] else linear(inputs[:1], packed, None)[0]
    assert torch.equal(products[[0, 2]], expected.expand(2, 5))


def test_weights_are_the_nearest_of_255_steps() -> None:
    weight = torch.randn((70, 64), generator=torch.Generator().manual_seed(2))
    weight[3] = 0.0
    packed = quantize_to_integers(weight)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((packed.unpack() - weight).abs() <= steps * 0.501).all()
    assert torch.equal(packed.rows(torch.tensor([69, 0])), packed.unpack()[[69, 0]])


def _encode(row: int, integers: int, groups: int, length: int) -> None:
    encode_integers(row, integers, length)
    encode_groups(row, groups, length)


# Only compiled functions can call the parts of kernels.
compiled_encode: Any = njit(_encode)


@given(seed=st.integers(0, 10_000), spoilt=st.sampled_from([1.0, 0.0, 1e-38, torch.nan, torch.inf]))
def test_a_step_quantizes_rows_as_a_single_layer_does(seed: int, spoilt: float) -> None:
    # Values of bfloat16 are often halfway between two integers.
    row = torch.randn(64, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    row[seed % 64] *= spoilt
    target = np.zeros(ROW_HEADER + INPUT_BYTES * len(row), np.uint8)
    groups = np.zeros((2, OPERAND_BYTES), np.uint8)
    compiled_encode(row.data_ptr(), target.ctypes.data, groups.ctypes.data, len(row))
    expected = quantize_to_integers(torch.ones((1, len(row)))).operands(row[None])[0].numpy()
    assert np.array_equal(target[ROW_HEADER:], expected[ROW_HEADER:])
    scales = target[:4].view(np.float32), expected[:4].view(np.float32)
    assert np.array_equal(*scales, equal_nan=True)
    operands = quantize(torch.ones((1, len(row))), "w4a8").operands(row[None]).numpy().reshape(2, -1)
    assert np.array_equal(groups[:, :GROUP], operands[:, :GROUP])
    own, expected_own = (each[:, GROUP : GROUP + 4].copy().view(np.float32) for each in (groups, operands))
    assert np.array_equal(own, expected_own, equal_nan=True)
    assert np.array_equal(groups[:, GROUP + 4 :], operands[:, GROUP + 4 :])


def add_code_products(
    builder: Any, inputs: Any, words: Any, totals: Any, instruction: Instruction, most: int
) -> Any:
    """Emit the sums of two vectors of codes with the same inputs, to which totals are added.

    Codes of 4 bits are the halves of the words. Those of 8 bits are the words, and the words without the
    highest bits that the coding does not use.
    """
    lanes, correction = words.type.count, builder.extract_element(totals, ir.Constant(ir.IntType(32), 0))
    mask = ir.Constant(words.type, [most * 0x01010101] * lanes)
    codes = [builder.and_(words, mask), builder.and_(builder.not_(words), mask)]
    if most == 15:
        codes = [emit_nibbles(builder, words, half) for half in range(2)]
    found = emit_start(builder, correction, most, instruction, lanes)
    found = emit_code_products(builder, [inputs[0]] * 2, codes, found, most, instruction)
    return emit_end(builder, found, correction, most, instruction, lanes)


def product_module(
    instruction: Instruction, lanes: int, emit: Callable[..., Any] = emit_integer_products
) -> ir.Module:
    """Return a module with ``void product(int32 *inputs, int32 *weights, int32 *sums)``; inputs are two."""
    module = ir.Module()
    integer = ir.IntType(32)
    words = ir.VectorType(integer, lanes).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [integer.as_pointer(), words, words])
    function = ir.Function(module, kind, "product")
    builder = ir.IRBuilder(function.append_basic_block())
    inputs, weights, totals = function.args
    two = [builder.load(builder.gep(inputs, [ir.Constant(integer, index)])) for index in range(2)]
    values = two, builder.load(weights, align=4), builder.load(totals, align=4)
    builder.store(emit(builder, *values, instruction), totals, align=4)
    builder.ret_void()
    return module


def compile_product(
    instruction: Instruction, lanes: int, emit: Callable[..., Any] = emit_integer_products
) -> tuple[Any, Any]:
    """Return the engine and the address of the function of ``product_module``, for this processor."""
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features)
    module = binding.parse_assembly(str(product_module(instruction, lanes, emit)))
    engine = binding.create_mcjit_compiler(module, machine)
    return engine, engine.get_function_address("product")


@pytest.mark.parametrize(("instruction", "lanes", "feature"), INSTRUCTIONS)
def test_all_instructions_compute_the_same(instruction: Instruction, lanes: int, feature: str) -> None:
    if not binding.get_host_cpu_features().get(feature):
        pytest.skip(f"this processor has no {feature}")
    engine, address = compile_product(instruction, lanes)
    product = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(address)
    random = np.random.Generator(np.random.PCG64(3))
    extremes = [(255, -127), (255, 127), (0, -128), (128, 1)]
    drawn = [tuple(random.integers((0, -128), (256, 128))) for _ in range(100)]
    for unsigned, signed in extremes + drawn:
        inputs = np.append(random.integers(0, 256, 3), unsigned).astype(np.uint8)
        stored = np.resize(inputs, 8)
        if instruction == "vpmaddwd":
            stored = inputs[[0, 2, 1, 3]].astype(np.uint16)
        weights = np.full((lanes, 4), signed, np.int8)
        weights[:, :3] = random.integers(-128, 128, (lanes, 3))
        totals = random.integers(-(2**30), 2**30, lanes).astype(np.int32)
        expected = totals + weights.astype(np.int32) @ inputs.astype(np.int32)
        product(stored.ctypes.data, weights.ctypes.data, totals.ctypes.data)
        assert np.array_equal(totals, expected)
    del engine


@pytest.mark.parametrize("most", [15, 63, 255])
@pytest.mark.parametrize(("instruction", "lanes", "feature"), INSTRUCTIONS)
def test_all_instructions_compute_the_same_of_codes(
    instruction: Instruction, lanes: int, feature: str, most: int
) -> None:
    if not binding.get_host_cpu_features().get(feature):
        pytest.skip(f"this processor has no {feature}")
    engine, address = compile_product(instruction, lanes, partial(add_code_products, most=most))
    product = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(address)
    random = np.random.Generator(np.random.PCG64(5))
    for extreme in (-127, 127, 0, *random.integers(-127, 128, 50)):
        inputs = np.resize(np.append(random.integers(-127, 128, 3), extreme).astype(np.int8), 8)
        stored = random.integers(0, 256, (lanes, 4)).astype(np.uint8)
        stored[0] = 255
        codes = stored & most, (stored >> 4 if most == 15 else ~stored & most)
        totals = np.full(lanes, random.integers(-1000, 1000), np.int32)
        expected = totals + sum(each.astype(np.int64) for each in codes) @ inputs[:4].astype(np.int64)
        product(inputs.ctypes.data, stored.ctypes.data, totals.ctypes.data)
        assert np.array_equal(totals, expected)
    del engine
