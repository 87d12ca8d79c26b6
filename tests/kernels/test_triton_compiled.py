"""The Triton kernels compiled to machine code for sm_80 and sm_90, without a GPU."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed: there are wheels only for Linux")

from quire.kernels.triton import compiled_kernels as resources
from quire.kernels.triton import configs
from quire.kernels.triton.block_kernels import copy_rows_kernel
from quire.kernels.triton.compiled_kernels import Resources, Variant


@pytest.fixture(autouse=True)
def no_garbage_collection() -> Iterator[None]:
    """Triton parses sources, and a collection meanwhile can trip the parser of CPython 3.11."""
    gc.disable()
    yield
    gc.enable()


ARCHES = pytest.mark.parametrize("arch", resources.SHARED_BYTES)


def check(kernels: Iterator[tuple[str, str, Resources]]) -> None:
    """Print the table, and fail if a kernel spills or takes more shared memory than there is."""
    misfits = []
    for name, arch, used in kernels:
        print(resources.format_row(name, used))
        if not used.fits(arch):
            misfits.append(resources.format_row(name, used))
    assert not misfits, "\n".join(misfits)


@ARCHES
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("kv_bits", [8, 16, 32])
def test_every_shipped_configuration_fits(arch: str, kernel: str, kv_bits: int) -> None:
    rows = [row for row in configs.table() if (row.arch, row.kernel, row.kv_bits) == (arch, kernel, kv_bits)]
    assert {row.head_dim for row in rows} == {32, 64, 128, 256}
    check(resources.shipped_resources(rows))


@ARCHES
def test_other_kernels_fit(arch: str) -> None:
    check((f"{arch} {name}", arch, used) for name, used in resources.other_resources(arch))


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
    check((resources.describe(row), arch, resources.attention_resources(row, variant)) for row in rows)


def test_a_spill_is_seen() -> None:
    greedy = replace(configs.find_config("decode", "sm_80", 16, 256, 16), num_warps=1)
    assert resources.attention_resources(greedy).spill_bytes > 0


@ARCHES
def test_blocks_are_copied_in_16_byte_words(arch: str) -> None:
    ptx = resources.compile_kernel(
        copy_rows_kernel, resources.COPY_TYPES, resources.COPY_SIZES, arch, 4, 3
    ).ptx
    for access in ("ld.global.v2.b64", "st.global.v2.b64"):
        assert access in ptx


@ARCHES
def test_attention_reads_blocks_asynchronously_in_16_byte_words(arch: str) -> None:
    row = configs.find_config("decode", arch, 16, 128, 16)
    assert "cp.async.cg.shared.global" in resources.attention_kernel(row, resources.PLAIN).ptx


@ARCHES
@pytest.mark.parametrize("has_bias", [False, True])
def test_weights_round_alike_with_masks_and_without(arch: str, has_bias: bool) -> None:
    """A chunk's first key blocks are masked where a longer chunk's are not: bits must not tell."""
    row = configs.find_config("prefill", arch, 32, 32, 16)
    ptx = resources.attention_kernel(row, Variant(has_bias=has_bias)).ptx
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
    assert "wgmma.mma_async" in resources.attention_kernel(row, resources.PLAIN).ptx


@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_rows_are_found_for_every_head_dim(block_size: int) -> None:
    for head_dim in range(1, 257):
        row = configs.find_config("decode", "sm_90", 16, head_dim, block_size)
        assert head_dim <= row.head_dim


def test_a_shape_without_a_row_is_an_error() -> None:
    with pytest.raises(LookupError, match="no decode row for sm_90, 16 bits, head_dim 512"):
        configs.find_config("decode", "sm_90", 16, 257, 16)
