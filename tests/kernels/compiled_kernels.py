"""Reads the registers, spills and shared memory of the Triton kernels, which are compiled without a GPU.

The machine code is read back with cuobjdump. A spill costs a round trip to memory in the inner loop.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quire.kernels.triton import configs
from quire.kernels.triton.attention_kernels import decode_kernel, prefill_kernel
from quire.kernels.triton.checks import MAX_HEAD_DIM
from quire.kernels.triton.configs import AttentionConfig

KIB = 1 << 10
SHARED_BYTES = {"sm_80": 99 * KIB, "sm_90": 227 * KIB}
"""Most shared memory of a program. 8.0 has more, but 8.6 and 8.9 use the same rows."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Resources(NamedTuple):
    """The resources of one program of a compiled kernel. Spills are on the stack, in memory."""

    num_registers: int
    spill_bytes: int
    shared_bytes: int

    def fits(self, arch: str) -> bool:
        return not self.spill_bytes and self.shared_bytes <= SHARED_BYTES[arch]


class Compiled(NamedTuple):
    """A compiled kernel."""

    resources: Resources
    ptx: str


class Variant(NamedTuple):
    """A kernel as some model calls it; ``head_dim`` 0 means the row's head_dim, without padding."""

    group: int = 4
    block_size: int = 16
    head_dim: int = 0
    kv_format: str | None = None
    has_bias: bool = False
    all_features: bool = False
    has_one_kv_head: bool = False
    """Triton turns arguments that are 1 into constants, except those that change from step to step."""


PLAIN = Variant()


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: str,
    num_warps: int,
    num_stages: int,
) -> Compiled:
    """Compile a kernel for an architecture; arguments in neither mapping are None.

    As in every model, pointers and strides are multiples of 16, except strides of scales, tables and ids.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    given = {name: constants.get(name) for name in names if signature[name] == "constexpr"}
    is_aligned = re.compile(r"stride_(?!scale|table|.*_id$)")
    aligned: dict[Any, Any] = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in types and (types[name].startswith("*") or is_aligned.match(name))
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, given, aligned),
        target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    # Triton's kernels use the stack only for spills.
    counts = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    resources = Resources(int(counts["REG"]), int(counts["STACK"]), compiled.metadata.shared)
    return Compiled(resources, compiled.asm["ptx"])


def attention_kernel(config: AttentionConfig, variant: Variant) -> Compiled:
    """Compile one row of the table for bfloat16 queries, or for float32 queries if the row has 32 bits.

    Rows for more than ``MAX_HEAD_DIM`` are those of latents of 512 and rotated keys of 64 elements.
    """
    is_latent = config.head_dim > MAX_HEAD_DIM
    value_dim = config.head_dim // 2 if is_latent else variant.head_dim or config.head_dim
    kernel: Any = prefill_kernel if config.kernel == "prefill" else decode_kernel
    floats = "fp32" if config.kv_bits == 32 else "bf16"
    kv_format = variant.kv_format or ("e4m3" if config.kv_bits == 8 else None)
    types = {
        **dict.fromkeys(("output", "query"), f"*{floats}"),
        **dict.fromkeys(("partial_outputs", "partial_sums"), "*fp32"),
        **dict.fromkeys(("block_tables", "query_starts", "seq_lens"), "*i32"),
        **dict.fromkeys(("num_seqs", "num_slots"), "i32"),
        **strides(kernel),
        "kv": {"e4m3": "*u8", "int8": "*i8", None: f"*{floats}"}[kv_format],
        "scale": "fp32",
    }
    if kv_format:
        types["kv_scales"] = "*fp32"
    if variant.has_bias:
        types |= {"alibi_slopes": "*fp32"}
    if variant.all_features:
        types |= {"sinks": "*fp32", "alibi_slopes": "*fp32", "window": "i32", "softcap": "fp32"}
    ones = ("stride_scale_value", "stride_scale_head") if variant.has_one_kv_head else ()
    types = {name: kind for name, kind in types.items() if name not in ones}
    constants = {
        **dict.fromkeys(ones, 1),
        "GROUP": 16 if is_latent else variant.group,
        "BLOCK_SIZE": variant.block_size,
        "HEAD_DIM": value_dim,
        "REST_DIM": 64 if is_latent else 0,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": triton.next_power_of_2(value_dim) if is_latent else config.head_dim,
        "BLOCK_R": 64 if is_latent else 16,
        **(
            {"STRIDE_BLOCK": 16 * 576 * 60, "STRIDE_VALUE": value_dim, "STRIDE_SLOT": value_dim + 64}
            | {"STRIDE_SCALE_BLOCK": 120 if kv_format else 0}
            if is_latent
            else _strides_of_blocks(config, variant, is_quantized=kv_format is not None)
        ),
        "KV_FORMAT": kv_format,
        "SPLIT_TOKENS": config.split_tokens,
        "MAX_SPLITS": configs.max_splits(8),
    }
    return compile_kernel(kernel, types, constants, config.arch, config.num_warps, config.num_stages)


def _strides_of_blocks(config: AttentionConfig, variant: Variant, is_quantized: bool) -> dict[str, int]:
    """Return the strides of a model with 32 layers; the scales follow a block's keys and values."""
    num_kv_heads = 1 if variant.has_one_kv_head else 8
    head_dim = variant.head_dim or config.head_dim
    num_scales = 32 * 2 * num_kv_heads if is_quantized else 0
    block = 32 * 2 * num_kv_heads * variant.block_size * head_dim + 4 * num_scales
    return {
        "STRIDE_BLOCK": block,
        "STRIDE_VALUE": num_kv_heads * variant.block_size * head_dim,
        "STRIDE_SLOT": head_dim,
        "STRIDE_SCALE_BLOCK": block // 4 if is_quantized else 0,
    }


def attention_resources(config: AttentionConfig, variant: Variant = PLAIN) -> Resources:
    return attention_kernel(config, variant).resources


def strides(kernel: Any) -> dict[str, str]:
    return {name: "i32" for name in kernel.arg_names if name.startswith("stride_")}


def describe(config: AttentionConfig) -> str:
    return (
        f"{config.arch} {config.kernel:7} {config.kv_bits:2} bits  head_dim {config.head_dim:3}  "
        f"{config.block_m:3} x {config.block_n:3}, {config.num_warps} warps, {config.num_stages} stages"
    )
