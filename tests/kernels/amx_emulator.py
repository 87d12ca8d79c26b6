"""Runs the machine code of products and of attention by AMX tiles on a processor without AMX.

Such a processor traps at each instruction of AMX. A handler of this signal decodes the instruction, does its
work with scalar operations, and continues behind it. It serves one thread.

Run as a program in the environment of ``environment()``, this compares tiles with vectors, and prints how
often it met each instruction, and how often each is in the assembly for Sapphire Rapids.
"""

from __future__ import annotations

import ctypes
import json
import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import binding
from numba import carray, cfunc, from_dtype, types  # type: ignore[attr-defined]

from quire.kernels import ops
from quire.kernels.cpu import attention, attention_amx
from quire.kernels.cpu.attention_program import ARGUMENTS
from quire.kernels.cpu.intrinsics import exact, float_from_bits, multiply_add, pointer
from quire.kernels.cpu.products import integer_weight, linear, packed_weight, packing, unit_product
from quire.kernels.cpu.products.amx_product import AMX_BFLOAT16, CHAINS, INTEGER_TILES, TILES
from quire.kernels.cpu.products.bfloat16_product import flush_denormals, restore_denormals
from tests.testing.attention_cases import make_case

INSTRUCTIONS = ("ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tdpbf16ps", "tdpbusd")
_FAULT = len(INSTRUCTIONS)
"""Place of the counter of instructions that the handler does not know, or whose tiles do not match."""
_SHAPES = np.zeros((8, 2), np.int64)
"""Rows and bytes of a row of each tile; 0 if it is not configured."""
_DATA = np.zeros((8, 16, 64), np.uint8)
_COUNTS = np.zeros(_FAULT + 1, np.int64)
_SHAPES_AT, _DATA_AT, _COUNTS_AT = (each.ctypes.data for each in (_SHAPES, _DATA, _COUNTS))
_GENERAL = np.array([13, 14, 12, 11, 15, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7], np.int64)
"""Place of each general register in the context of a signal, by the number in an instruction."""
_GENERAL_AT = _GENERAL.ctypes.data
_REGISTERS, _INSTRUCTION_POINTER = 40, 16
_SIGILL, _SA_SIGINFO = 4, 4


def environment() -> dict[str, str]:
    """Return the environment in which Numba compiles instructions of AMX too."""
    features = f"{binding.get_host_cpu_features().flatten()},+amx-tile,+amx-bf16,+amx-int8"
    cpu = binding.get_host_cpu_name()
    return os.environ | {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features, "OMP_NUM_THREADS": "1"}


@exact
def _tile(number: int, kind: Any, columns: int) -> Any:
    return carray(pointer(_DATA_AT + 1024 * number, kind), (16, columns))


@exact
def _configure(config: int) -> None:
    shapes = carray(pointer(_SHAPES_AT, np.int64), (8, 2))
    settings = carray(pointer(config, np.uint8), (64,))
    for tile in range(8):
        shapes[tile, 0] = settings[48 + tile] if config else 0
        shapes[tile, 1] = settings[16 + 2 * tile] if config else 0
        data = _tile(tile, np.uint8, 64)
        for row in range(16):
            for column in range(64):
                data[row, column] = 0


@exact
def _move(tile: int, base: int, stride: int, stores: bool) -> None:
    shapes = carray(pointer(_SHAPES_AT, np.int64), (8, 2))
    data = _tile(tile, np.uint8, 64)
    for row in range(shapes[tile, 0]):
        memory = carray(pointer(base + row * stride, np.uint8), (64,))
        for column in range(shapes[tile, 1]):
            if stores:
                memory[column] = data[row, column]
            else:
                data[row, column] = memory[column]


@exact
def _match(total: int, left: int, right: int) -> bool:
    """Return whether the shapes of two tiles and of their product match."""
    shapes = carray(pointer(_SHAPES_AT, np.int64), (8, 2))
    if shapes[total, 0] == 0 or shapes[left, 0] != shapes[total, 0]:
        return False
    matches: bool = shapes[right, 0] == shapes[left, 1] // 4 and shapes[right, 1] == shapes[total, 1]
    return matches


@exact
def _multiply_integers(total: int, left: int, right: int) -> None:
    """Add the product of a tile of unsigned integers and one of signed ones to another one."""
    shapes = carray(pointer(_SHAPES_AT, np.int64), (8, 2))
    sums = _tile(total, np.int32, 16)
    inputs, weights = _tile(left, np.uint8, 64), _tile(right, np.int8, 64)
    for row in range(shapes[total, 0]):
        for column in range(shapes[total, 1] // 4):
            for k in range(shapes[left, 1]):
                product = np.int32(inputs[row, k]) * np.int32(weights[k // 4, 4 * column + k % 4])
                sums[row, column] += np.int32(product)


@exact
def _multiply(total: int, left: int, right: int) -> None:
    """Add the product of two tiles of bfloat16 to another one."""
    shapes = carray(pointer(_SHAPES_AT, np.int64), (8, 2))
    num_rows, num_pairs, width = shapes[total, 0], shapes[left, 1] // 4, shapes[total, 1]
    register = flush_denormals(CHAINS)
    sums, inputs, weights = (
        _tile(total, np.float32, 16),
        _tile(left, np.uint16, 32),
        _tile(right, np.uint16, 32),
    )
    for row in range(num_rows):
        for column in range(width // 4):
            even, odd = np.float32(0.0), np.float32(0.0)
            for k in range(num_pairs):
                x = float_from_bits(np.int32(np.uint32(inputs[row, 2 * k]) << np.uint32(16)))
                w = float_from_bits(np.int32(np.uint32(weights[k, 2 * column]) << np.uint32(16)))
                even = multiply_add(x, w, even)
                x = float_from_bits(np.int32(np.uint32(inputs[row, 2 * k + 1]) << np.uint32(16)))
                w = float_from_bits(np.int32(np.uint32(weights[k, 2 * column + 1]) << np.uint32(16)))
                odd = multiply_add(x, w, odd)
            sums[row, column] += even + odd
    restore_denormals(register, CHAINS)


def _handle(signal: int, info: int, context: int) -> None:
    """Execute the instruction of AMX at which the thread was trapped."""
    counts = carray(pointer(_COUNTS_AT, np.int64), (_FAULT + 1,))
    registers = carray(pointer(context + _REGISTERS, np.int64), (23,))
    general = carray(pointer(_GENERAL_AT, np.int64), (16,))
    at = registers[_INSTRUCTION_POINTER]
    code = carray(pointer(at, np.uint8), (16,))
    prefix, opcode, mode, low = code[2] & 3, code[3], code[4] >> 6, np.int64(code[4] & 7)
    number = np.int64(code[4] >> 3 & 7)
    length, address, stride = 5, np.int64(0), np.int64(0)
    if mode != 3:
        base = low | (0 if code[1] & 0x20 else 8)
        if low == 4:
            length = 6
            base = np.int64(code[5] & 7) | (0 if code[1] & 0x20 else 8)
            index = np.int64(code[5] >> 3 & 7) | (0 if code[1] & 0x40 else 8)
            if index != 4:
                stride = registers[general[index]] << np.int64(code[5] >> 6)
        address = registers[general[base]]
        if mode == 1:
            address += np.int64(carray(pointer(at + length, np.int8), (1,))[0])
            length += 1
        elif mode == 2:
            address += np.int64(carray(pointer(at + length, np.int32), (1,))[0])
            length += 4
    kind = _FAULT
    if code[0] == 0xC4 and code[1] & 31 == 2:
        if opcode == 0x49 and prefix == 0:
            kind = 1 if mode == 3 else 0
            _configure(address)
        elif opcode == 0x4B and prefix >= 2:
            kind = 2 if prefix == 3 else 3
            _move(number, address, stride, prefix == 2)
        else:
            weights = np.int64(~code[2] >> 3 & 7)
            if opcode == 0x5C and prefix == 2 and _match(number, low, weights):
                kind = 4
                _multiply(number, low, weights)
            elif opcode == 0x5E and prefix == 1 and _match(number, low, weights):
                kind = 5
                _multiply_integers(number, low, weights)
    counts[kind] += 1
    registers[_INSTRUCTION_POINTER] = at + length


class _Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def install() -> Any:
    """Handle the signal; return the handler, which must be kept."""
    handler = cfunc(types.void(types.int32, types.int64, types.int64))(_handle)
    action = _Action(handler=handler.address, flags=_SA_SIGINFO)
    ctypes.CDLL(None).sigaction(_SIGILL, ctypes.byref(action), None)
    return handler


def compare(num_rows: int, in_features: int, out_features: int, num_segments: int) -> None:
    """Compare the sums by tiles with those by vectors."""
    generator = torch.Generator().manual_seed(num_rows * in_features)
    scales = torch.randint(-40, 20, (num_rows, in_features), generator=generator)
    inputs = (torch.randn((num_rows, in_features), generator=generator) * 2.0**scales).bfloat16()
    weight = torch.randn((out_features, in_features), generator=generator).bfloat16()
    results = []
    for by_tiles in (True, False):
        for module in (packing, packed_weight):
            setattr(module, "may_use_tiles", partial(bool, by_tiles))  # noqa: B010
        packing.tiles_are_exact.cache_clear()
        packed = packing.pack(weight, AMX_BFLOAT16)
        assert packed.stored is (TILES if by_tiles else CHAINS)
        results.append(linear.sums(inputs, packed, None, num_segments))
    assert torch.equal(*results), (num_rows, in_features, out_features, num_segments)


def compare_integers(num_rows: int, in_features: int, out_features: int) -> None:
    """Compare the sums of integers by tiles with those by vectors."""
    generator = torch.Generator().manual_seed(num_rows * in_features)
    inputs = torch.randn((num_rows, in_features), generator=generator)
    weight = torch.randn((out_features, in_features), generator=generator)
    setattr(integer_weight, "may_use_tiles", lambda _: True)  # noqa: B010
    packed = integer_weight.quantize_to_integers(weight)
    assert packed.stored is INTEGER_TILES
    vectors = replace(packed, by_tiles=False)
    assert torch.equal(*(linear.sums(inputs, each, None) for each in (packed, vectors)))


def compare_attention(lengths: list[tuple[int, int]], **shape: Any) -> None:
    """Compare attention by tiles with that by vectors, for sequences of (cached, new) tokens."""
    case = make_case(lengths, dtype=torch.bfloat16, **shape)
    ops.write_kv(case.key, case.value, case.kv_layer, case.metadata.slot_mapping)
    results = []
    for by_tiles in (True, False):
        setattr(attention_amx, "tiles_are_exact", partial(bool, by_tiles))  # noqa: B010
        attention.kernel_for.cache_clear()
        before = _COUNTS.copy()
        results.append(
            attention.paged_attention(
                case.query.float(), case.kv_layer, *case.metadata[:3], scale=0.2, arithmetic=AMX_BFLOAT16
            )
        )
        assert ((before < _COUNTS)[[0, 1, 2, 3, 4]] == by_tiles).all()
    assert torch.equal(*results), (lengths, shape)


def assembly() -> list[str]:
    """Return the assembly of products and of attention by tiles for Intel's Sapphire Rapids."""

    def product(address: int) -> None:
        field: Any = np.int64(address)
        operands = unit_product.Product(field, field, field, field, field, field, field, field)
        unit_product.multiply_unit(operands, 1, 0, TILES)
        unit_product.multiply_unit(operands, 1, 0, INTEGER_TILES)

    # A kernel that was read from disk has no code to look at.
    attend = attention_amx.kernel_for(64, 16, 3).__wrapped__
    kernels = (
        cfunc(types.void(types.int64))(product),
        cfunc(types.void(types.CPointer(from_dtype(ARGUMENTS))), error_model="numpy")(attend),
    )
    target = binding.Target.from_default_triple().create_target_machine(cpu="sapphirerapids", opt=3)
    return [target.emit_assembly(binding.parse_assembly(each.inspect_llvm())) for each in kernels]


def main() -> None:
    """Compare products of many shapes; print counts of instructions, met and in the assembly."""
    kept = install()
    for num_rows in (1, 2, 15, 16, 17, 31, 32, 33, 96, 100):
        compare(num_rows, 96, 130, 1)
    compare(20, 2080, 64, 1)
    compare(35, 512, 70, 8)
    for num_rows, in_features, out_features in ((1, 64, 70), (3, 64, 70), (17, 96, 130), (33, 2112, 64)):
        compare_integers(num_rows, in_features, out_features)
    compare_attention([(0, 20), (70, 1), (64, 40)], group=3)
    compare_attention([(30, 40)], num_kv_heads=1, head_dim=96, block_size=32)
    setattr(attention_amx, "tiles_are_exact", partial(bool, True))  # noqa: B010
    written = [[text.split().count(name) for name in INSTRUCTIONS] for text in assembly()]
    print(json.dumps({"met": _COUNTS.tolist(), "written": written}))
    del kept


if __name__ == "__main__":
    main()
