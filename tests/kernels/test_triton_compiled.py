"""The Triton kernels compiled to machine code for sm_80 and sm_90, without a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there are wheels only for Linux")

from quire.kernels.triton import configs
from quire.kernels.triton.attention_kernels import combine_kernel
from quire.kernels.triton.block_kernels import copy_rows_kernel, write_kv_kernel
from quire.kernels.triton.configs import AttentionConfig
from tests.kernels.compiled_kernels import (
    KIB,
    PLAIN,
    SHARED_BYTES,
    Resources,
    Variant,
    attention_kernel,
    attention_resources,
    compile_kernel,
    describe,
    strides,
)

pytestmark = pytest.mark.usefixtures("no_garbage_collection")

FEATURED = Variant(all_features=True)
COMBINE_TYPES = {
    **dict.fromkeys(("partial_outputs", "partial_sums", "sinks"), "*fp32"),
    **dict.fromkeys(("query_starts", "seq_lens"), "*i32"),
    **strides(combine_kernel),
    "output": "*bf16",
    "num_slots": "i32",
}
COMBINE_SIZES = {
    "HEAD_DIM": 256,
    "BLOCK_D": 256,
    "BLOCK_N": 64,
    "SPLIT_TOKENS": 512,
    "MAX_SPLITS": 64,
    "SPLITS_AT_ONCE": 16,
}
WRITE_TYPES = {
    **dict.fromkeys(("key", "value", "kv"), "*bf16"),
    **strides(write_kv_kernel),
    "slot_mapping": "*i64",
    "num_kv_heads": "i32",
}
WRITE_SIZES = {
    "BLOCK_SIZE": 16,
    "HEAD_DIM": 128,
    "VALUE_DIM": 128,
    "BLOCK_H": 32,
    "BLOCK_D": 128,
    "KV_FORMAT": None,
    "SCALE": 1.0,
}
COPY_TYPES = {
    **dict.fromkeys(("target", "source", "target_ids", "source_ids"), "*i64"),
    **strides(copy_rows_kernel),
    "num_pairs": "i32",
}
COPY_SIZES = {"PAIRS": 1024}


ARCHES = pytest.mark.parametrize("arch", SHARED_BYTES)


def other_resources(arch: str) -> Iterator[tuple[str, Resources]]:
    """Compile the kernels that have no rows, at the sizes that take most."""
    narrow = {"kv": "*u8", "kv_scales": "*fp32"}
    for name, kernel, types, sizes in (
        ("combine", combine_kernel, COMBINE_TYPES, COMBINE_SIZES),
        ("write_kv", write_kv_kernel, WRITE_TYPES, WRITE_SIZES),
        ("write_kv 8 bits", write_kv_kernel, WRITE_TYPES | narrow, WRITE_SIZES | {"KV_FORMAT": "e4m3"}),
        ("copy_rows", copy_rows_kernel, COPY_TYPES, COPY_SIZES),
    ):
        yield name, compile_kernel(kernel, types, sizes, arch, 4, 3).resources


def shipped_resources(selected: Sequence[AttentionConfig]) -> Iterator[tuple[str, str, Resources]]:
    """Yield (name, architecture, resources) of each row, plain and with all features."""
    # No model with latent attention has other features.
    jobs = [(row, each) for row in selected for each in (PLAIN, FEATURED)[: 1 if row.head_dim > 256 else 2]]
    # The compiler and the assembler work without the interpreter's lock.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as executor:
        compiled = executor.map(lambda job: attention_resources(*job), jobs)
        for (config, variant), used in zip(jobs, compiled, strict=True):
            yield describe(config) + (" + all" if variant.all_features else ""), config.arch, used


def format_row(name: str, resources: Resources) -> str:
    registers, spills, shared = resources
    return f"{name:76} {registers:4} registers {spills:5} B spilled {shared / KIB:6.1f} KiB shared"


def check(kernels: Iterator[tuple[str, str, Resources]]) -> None:
    """Print the table, and fail if a kernel spills or takes more shared memory than there is."""
    misfits = []
    for name, arch, used in kernels:
        print(format_row(name, used))
        if not used.fits(arch):
            misfits.append(format_row(name, used))
    assert not misfits, "\n".join(misfits)


@ARCHES
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("kv_bits", [8, 16, 32])
def test_every_shipped_configuration_fits(arch: str, kernel: str, kv_bits: int) -> None:
    rows = [row for row in configs.table() if (row.arch, row.kernel, row.kv_bits) == (arch, kernel, kv_bits)]
    assert {row.head_dim for row in rows} == {32, 64, 128, 256, 1024}
    check(shipped_resources(rows))


@ARCHES
def test_other_kernels_fit(arch: str) -> None:
    check((f"{arch} {name}", arch, used) for name, used in other_resources(arch))


@ARCHES
@pytest.mark.parametrize(
    "variant",
    [
        Variant(group=1),
        Variant(group=7),
        Variant(group=8, block_size=128),
        Variant(head_dim=80),
        Variant(kv_format="int8"),
        Variant(kv_format="e4m3", has_one_kv_head=True),
    ],
    ids=str,
)
def test_other_models_fit(arch: str, variant: Variant) -> None:
    kv_bits = 8 if variant.kv_format else 16
    rows = [configs.find_config(kernel, arch, kv_bits, 128, 16) for kernel in ("prefill", "decode")]
    check((describe(row), arch, attention_resources(row, variant)) for row in rows)


def test_a_spill_is_seen() -> None:
    greedy = replace(configs.find_config("decode", "sm_80", 16, 256, 16), num_warps=1)
    assert attention_resources(greedy).spill_bytes > 0


@ARCHES
def test_blocks_are_copied_in_16_byte_words(arch: str) -> None:
    ptx = compile_kernel(copy_rows_kernel, COPY_TYPES, COPY_SIZES, arch, 4, 3).ptx
    for access in ("ld.global.v2.b64", "st.global.v2.b64"):
        assert access in ptx


@ARCHES
def test_attention_reads_blocks_asynchronously_in_16_byte_words(arch: str) -> None:
    row = configs.find_config("decode", arch, 16, 128, 16)
    assert "cp.async.cg.shared.global" in attention_kernel(row, PLAIN).ptx


@ARCHES
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_round_alike_with_masks_and_without(arch: str, has_bias: bool) -> None:
    """A chunk's first key blocks are masked where a longer chunk's are not: bits must not tell."""
    row = configs.find_config("prefill", arch, 32, 32, 16)
    ptx = attention_kernel(row, Variant(has_bias=has_bias)).ptx
    computed_by: dict[str, str] = {}
    exponents: list[str] = []
    for line in ptx.splitlines():
        if found := re.match(r"\s*(\S+)\s+(%\w+), *(%\w+)", line):
            operation, target, source = found.groups()
            if operation.startswith("ex2"):
                exponents.append(computed_by[source])
            computed_by[target] = operation
    half = len(exponents) // 2
    assert half
    assert exponents[:half] == exponents[half:], "the loops without masks and with them differ"


def test_prefill_uses_the_tensor_cores_of_hopper() -> None:
    row = configs.find_config("prefill", "sm_90", 16, 128, 16)
    assert "wgmma.mma_async" in attention_kernel(row, PLAIN).ptx


@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_rows_are_found_for_every_head_dim(block_size: int) -> None:
    for head_dim in range(1, 257):
        row = configs.find_config("decode", "sm_90", 16, head_dim, block_size)
        assert head_dim <= row.head_dim


def test_a_shape_without_a_row_is_an_error() -> None:
    with pytest.raises(LookupError, match="no decode row for sm_90, 4 bits, head_dim 256"):
        configs.find_config("decode", "sm_90", 4, 256, 16)
