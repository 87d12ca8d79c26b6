"""Paged attention on GPUs: checks the arguments, allocates scratch memory and launches the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from quire.kernels.quantization import KV_FORMATS
from quire.kernels.triton import checks, configs
from quire.kernels.triton.attention_kernels import combine_kernel, decode_kernel, prefill_kernel
from quire.kernels.triton.configs import AttentionConfig

_PROGRAMS_PER_MULTIPROCESSOR = 8
_MIN_WORKERS = 4
"""Fewest programs for the splits of one sequence, even if the batch fills the device without splitting.

One sequence may be much longer than the others.
"""
_SPLITS_AT_ONCE = 16
_MOST_LATENT_HEADS = 16
"""Most query heads of a program with latent attention: the rows of the smallest matrix product."""

FindConfig = Callable[[configs.Kernel, str, int, int, int], AttentionConfig]
"""Function of kernel, architecture, bits of a stored element, head_dim and block_size."""


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    is_chunked: bool = False,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    latent_dim: int | None = None,
    max_new_tokens: int | None = None,
    find_config: FindConfig = configs.find_config,
) -> torch.Tensor:
    """Compute attention over paged blocks on a GPU; see ``ops.paged_attention``.

    The call never waits for the device, and a CUDA graph can capture it. A sequence without new tokens is
    skipped, so that a fixed batch can be padded with such sequences.

    Args:
        kv_scales: float32 ``[num_blocks, 2, num_kv_heads]``, only with 8-bit blocks.
        latent_dim: elements of a latent; None if blocks hold keys and values.
        max_new_tokens: the most new tokens of any sequence, if the host knows it. If it is 1, the prefill
            kernel is not launched. None is always correct.
        find_config: returns the tile sizes of a kernel.
    """
    checks.check_attention(
        query, kv_layer, block_tables, query_starts, seq_lens, kv_scales, sinks, alibi_slopes, latent_dim
    )
    num_tokens, num_heads, head_dim = query.shape
    value_dim = latent_dim or head_dim
    output = torch.empty((num_tokens, num_heads, value_dim), dtype=query.dtype, device=query.device)
    num_seqs = seq_lens.shape[0]
    if not num_tokens or not num_seqs:
        return output
    num_kv_heads, block_size = kv_layer.shape[2:4]
    stride_value, stride_head = kv_layer.stride()[1:3]
    scale_strides = kv_scales.stride()[1:] if kv_scales is not None else (0, 0)
    if latent_dim is not None:
        # All heads share the rows. Each program computes some heads, as if they had a KV head of their own.
        num_kv_heads, stride_value, stride_head = num_heads // _latent_group(num_heads), latent_dim, 0
        scale_strides = (scale_strides[0], 0)
    group = num_heads // num_kv_heads
    kv_format = KV_FORMATS.get(kv_layer.dtype)
    launch = _Launch(
        output=output,
        inputs=(
            query,
            checks.as_storable(kv_layer),
            kv_scales,
            block_tables,
            query_starts,
            seq_lens,
            sinks,
            alibi_slopes,
        ),
        logits=(scale, sliding_window, logit_softcap),
        strides=(
            *output.stride()[:2],
            *query.stride()[:2],
            stride_head,
            *scale_strides,
            block_tables.stride(0),
        ),
        constants={
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "HEAD_DIM": value_dim,
            "REST_DIM": head_dim - value_dim,
            "BLOCK_D": max(triton.next_power_of_2(value_dim), 32),
            "BLOCK_R": max(triton.next_power_of_2(head_dim - value_dim), 16),
            # Strides are constants, so that finding a key in a block takes one multiplication.
            "STRIDE_BLOCK": kv_layer.stride(0),
            "STRIDE_VALUE": stride_value,
            "STRIDE_SLOT": kv_layer.stride(3),
            "STRIDE_SCALE_BLOCK": kv_scales.stride(0) if kv_scales is not None else 0,
            "KV_FORMAT": kv_format.name if kv_format else None,
            "IS_CHUNKED": is_chunked,
        },
    )
    architecture = configs.arch_of(kv_layer.device)
    kv_bits = configs.kv_bits_of(query, kv_layer)
    with torch.cuda.device_of(kv_layer):  # type: ignore[no-untyped-call]
        if max_new_tokens != 1 and num_tokens > 1:
            config = find_config("prefill", architecture, kv_bits, head_dim, block_size)
            _prefill(launch, config, num_tokens, num_seqs, num_kv_heads, group)
        config = find_config("decode", architecture, kv_bits, head_dim, block_size)
        _decode(launch, config, num_seqs, num_kv_heads, group, longest=block_tables.shape[1] * block_size)
    return output


def _latent_group(num_heads: int) -> int:
    """Return how many query heads a program computes with latent attention."""
    return max(each for each in range(1, _MOST_LATENT_HEADS + 1) if num_heads % each == 0)


class _Launch(NamedTuple):
    """Arguments that the prefill and decode kernels share."""

    output: torch.Tensor
    inputs: tuple[torch.Tensor | None, ...]
    logits: tuple[float, int | None, float | None]
    strides: tuple[int, ...]
    constants: dict[str, Any]


def _prefill(
    launch: _Launch, config: AttentionConfig, num_tokens: int, num_seqs: int, num_kv_heads: int, group: int
) -> None:
    block_m = max(config.block_m, triton.next_power_of_2(group))
    # This is an upper bound: a program whose tile does not exist returns immediately.
    num_tiles = num_tokens // (block_m // group) + num_seqs
    prefill_kernel[(num_tiles, num_kv_heads)](
        launch.output,
        *launch.inputs,
        num_seqs,
        *launch.logits,
        *launch.strides,
        **launch.constants,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )


def _decode(
    launch: _Launch, config: AttentionConfig, num_seqs: int, num_kv_heads: int, group: int, longest: int
) -> None:
    device, num_heads = launch.output.device, num_kv_heads * group
    max_splits = configs.max_splits(num_kv_heads)
    window = launch.logits[1]
    if window is not None:
        longest = min(longest, window + config.block_n)
    num_slots = max(1, min(max_splits, triton.cdiv(longest, config.split_tokens)))
    # The batch decides which program computes which split, but not what a split computes.
    programs = _PROGRAMS_PER_MULTIPROCESSOR * configs.num_multiprocessors(device)
    workers = min(num_slots, max(_MIN_WORKERS, triton.cdiv(programs, num_seqs * num_kv_heads)))
    slots = (num_seqs, num_heads, num_slots if num_slots > 1 else 0)
    block_d = launch.constants["BLOCK_D"]
    partial_outputs = torch.empty((*slots, block_d), dtype=torch.float32, device=device)
    partial_sums = torch.empty((*slots, 2), dtype=torch.float32, device=device)
    cut = {"BLOCK_N": config.block_n, "SPLIT_TOKENS": config.split_tokens, "MAX_SPLITS": max_splits}
    decode_kernel[(workers, num_kv_heads * triton.cdiv(group, config.block_m), num_seqs)](
        launch.output,
        partial_outputs,
        partial_sums,
        *launch.inputs,
        *launch.logits,
        num_slots,
        *launch.strides,
        **launch.constants,
        **cut,
        BLOCK_M=config.block_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=True,
    )
    if num_slots > 1:
        _, _, _, _, query_starts, seq_lens, sinks, _ = launch.inputs
        combine_kernel[(num_heads, num_seqs)](
            launch.output,
            partial_outputs,
            partial_sums,
            query_starts,
            seq_lens,
            sinks,
            window,
            num_slots,
            *launch.strides[:2],
            HEAD_DIM=launch.constants["HEAD_DIM"],
            IS_CHUNKED=launch.constants["IS_CHUNKED"],
            BLOCK_D=block_d,
            **cut,
            SPLITS_AT_ONCE=_SPLITS_AT_ONCE,
            num_warps=4,
            enable_fp_fusion=True,
        )
