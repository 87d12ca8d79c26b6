"""The operations on paged KV blocks, for any device.

KV memory is one tensor ``kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; a layer's view
is ``kv[:, layer]``. 8-bit blocks have scales, float32 ``[num_blocks, num_layers, 2, num_kv_heads]``.

With latent attention a layer's view is ``[num_blocks, 1, 1, block_size, head_dim]``. All query heads share a
row: a latent, which is also the value, and then the rotated key. Each has a scale in 8-bit blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch

from quire.kernels.cpu.attention_tiles import span_blocks
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.quantization import KV_FORMATS

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _kernel(name: str, device_type: str) -> Callable[..., Any]:
    """Return a function for a device; it is imported at its first use, since a GPU needs no Numba."""
    module = "attention" if name == "paged_attention" else "blocks"
    folder = "cpu" if device_type == "cpu" else "triton"
    return getattr(import_module(f"quire.kernels.{folder}.{module}"), name)  # type: ignore[no-any-return]


def blocks_summed_together(device: torch.device, block_size: int) -> int:
    """Return the kernel's tile in blocks.

    If a multiple of this number of blocks is left out at the start of a block table, attention gives the same
    bits. On a GPU it is 1.
    """
    return span_blocks(block_size) if device.type == "cpu" else 1


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    is_chunked: bool = False,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    latent_dim: int | None = None,
    arithmetic: str | None = None,
) -> torch.Tensor:
    """Attend causally with each new token over itself and all earlier tokens of its sequence.

    A new token at position p sees positions ``max(0, p - sliding_window + 1)..p``; its own key and value must
    have been written.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; consecutive query heads share a KV head.
        kv_layer: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``.
        metadata: the step's sequences.
        scale: factor of the dot products.
        sliding_window: number of positions that a token sees, including its own; None means all.
        is_chunked: whether a token sees its chunk instead of a window that ends with it: the positions from
            the last multiple of ``sliding_window`` on. Tables must then include all blocks.
        logit_softcap: scores become ``cap * tanh(score / cap)``.
        sinks: ``[num_heads]``, for each head a logit that takes part in the softmax and has no value.
        alibi_slopes: ``[num_heads]``; ``slope * (key position - p)`` is added to each score.
        kv_scales: float32 ``[num_blocks, 2, num_kv_heads]``, only with 8-bit blocks.
        latent_dim: elements of a latent, the first of a row; None if blocks hold keys and values.
        arithmetic: name of the order of sums, see ``kernels.cpu.attention.kernel_for``; only on the CPU.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the query's dtype; the last dimension is ``latent_dim`` if
        that is given.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_blocks(kv_layer, kv_scales)
    _check_latents(kv_layer, latent_dim)
    if query.shape[2] != kv_layer.shape[4] or query.shape[1] % kv_layer.shape[2]:
        raise ValueError(
            f"query [tokens, heads, head_dim] is {tuple(query.shape)}; blocks have {kv_layer.shape[2]} "
            f"KV heads of {kv_layer.shape[4]}: head_dim must be equal and heads a multiple"
        )
    _check_dtype("query", query, kv_layer)
    for name, each in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if each is not None and each.shape != query.shape[1:2]:
            raise ValueError(f"{name} is {tuple(each.shape)}: there are {query.shape[1]} query heads")
    # The kernels read these as arrays without strides.
    sinks, alibi_slopes = (None if each is None else each.contiguous() for each in (sinks, alibi_slopes))
    only_on_cpu = {"arithmetic": arithmetic} if query.is_cpu else {}
    output: torch.Tensor = _kernel("paged_attention", query.device.type)(
        query,
        kv_layer,
        metadata.block_tables,
        metadata.query_starts,
        metadata.seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        is_chunked=is_chunked,
        logit_softcap=logit_softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        kv_scales=kv_scales,
        latent_dim=latent_dim,
        max_new_tokens=metadata.max_new_tokens,
        **only_on_cpu,
    )
    return output


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layer: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write the new tokens' keys and values ``[num_tokens, num_kv_heads, head_dim]`` into their slots.

    Tokens with a slot below 0 are skipped. 8-bit blocks get quantized tokens, and the token in slot 0 sets
    its block's scales. The tokens of a block must be consecutive and in order. With latent attention the key
    is a whole row, and the value its latent, which is not written a second time.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_blocks(kv_layer, kv_scales)
    expected = (slot_mapping.shape[0], kv_layer.shape[2], kv_layer.shape[4])
    has_values = kv_layer.shape[1] == 2
    if not has_values:
        _check_latents(kv_layer, value.shape[-1])
    if tuple(key.shape) != expected or (has_values and tuple(value.shape) != expected):
        raise ValueError(f"key and value must be {expected}, got {tuple(key.shape)} and {tuple(value.shape)}")
    _check_dtype("key", key, kv_layer)
    _check_dtype("value", value, kv_layer)
    _kernel("write_kv", key.device.type)(key, value, kv_layer, slot_mapping, kv_scales)


def copy_blocks(blocks: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy each block ``pairs[i, 0]`` of ``blocks[num_blocks, ...]`` to block ``pairs[i, 1]``.

    No block may be in both columns, or twice in the second, since all copies run concurrently.
    """
    _kernel("copy_blocks", blocks.device.type)(blocks, pairs)


def gather_blocks(blocks: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy each block ``blocks[ids[i]]`` to ``out[i]``."""
    _kernel("gather_blocks", blocks.device.type)(blocks, ids, out)


def scatter_blocks(staging: torch.Tensor, ids: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copy each ``staging[i]`` to block ``blocks[ids[i]]``; no id may occur twice."""
    _kernel("scatter_blocks", blocks.device.type)(staging, ids, blocks)


def _check_dtype(name: str, tensor: torch.Tensor, kv_layer: torch.Tensor) -> None:
    if kv_layer.dtype not in KV_FORMATS and tensor.dtype != kv_layer.dtype:
        raise ValueError(f"{name} is {tensor.dtype}, blocks are {kv_layer.dtype}: they must be equal")


def _check_latents(kv_layer: torch.Tensor, latent_dim: int | None) -> None:
    num_parts, num_kv_heads, head_dim = kv_layer.shape[1], kv_layer.shape[2], kv_layer.shape[4]
    if latent_dim is None:
        if num_parts != 2:
            raise ValueError(f"blocks of {num_parts} part hold latents, and latent_dim is missing")
    elif (num_parts, num_kv_heads) != (1, 1) or not 0 < latent_dim < head_dim:
        raise ValueError(f"rows of latents have one part and one head, got {tuple(kv_layer.shape)}")


def _check_blocks(kv_layer: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    if kv_layer.dtype not in (*_DTYPES, *KV_FORMATS):
        known = [*map(str, (*_DTYPES, *KV_FORMATS))]
        raise ValueError(f"blocks are {kv_layer.dtype}: there are kernels for {known}")
    num_blocks, _, num_kv_heads = kv_layer.shape[:3]
    scales_shape = (num_blocks, 2, num_kv_heads) if kv_layer.dtype in KV_FORMATS else None
    if scales_shape != (None if kv_scales is None else tuple(kv_scales.shape)):
        raise ValueError(f"blocks of {kv_layer.dtype} have scales of shape {scales_shape}, got {kv_scales}")
    # Each head of a block must be contiguous. On the CPU, other ranks' heads may lie between the layer's
    # heads.
    part = kv_layer[0, 0, 0] if kv_layer.device.type == "cpu" and kv_layer.numel() else kv_layer[0]
    if part.numel() and not part.is_contiguous():
        raise ValueError(f"the heads of blocks must be contiguous: {kv_layer.stride()}")
