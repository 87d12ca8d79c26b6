"""The operations on paged KV blocks, registered with torch: its dispatcher picks the implementation.

KV memory is one tensor ``kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; a layer's view
is ``kv[:, layer]``. As ``torch.library`` operators they are opaque to ``torch.compile``, which fuses what is
around them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quire.kernels.cpu import attention as cpu_attention
from quire.kernels.cpu import blocks as cpu_blocks
from quire.kernels.metadata import AttentionMetadata

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

if torch.cuda.is_available():
    from quire.kernels.triton import attention as triton_attention
    from quire.kernels.triton import blocks as triton_blocks

    _ON_CUDA = {"paged_attention": triton_attention.paged_attention, "write_kv": triton_blocks.write_kv}

_library = torch.library.Library("quire", "DEF")


def _register(schema: str, on_cpu: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Define an operator with its implementations and what it returns without being run."""
    name = _library.define(schema)
    _library.impl(name, on_cpu, "CPU")
    if torch.cuda.is_available():
        _library.impl(name, _ON_CUDA[name], "CUDA")
    torch.library.register_fake(f"quire::{name}", shape, lib=_library)


_register(
    "paged_attention(Tensor query, Tensor kv_layer, Tensor block_tables, Tensor query_starts, "
    "Tensor seq_lens, *, float scale, int? sliding_window=None, float? logit_softcap=None, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None) -> Tensor",
    cpu_attention.paged_attention,
    lambda query, *_, **__: query.new_empty(query.shape),
)
_register(
    "write_kv(Tensor key, Tensor value, Tensor(a!) kv_layer, Tensor slot_mapping) -> ()",
    cpu_blocks.write_kv,
    lambda *_: None,
)


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally with each new token over all earlier tokens of its sequence.

    A new token at position p sees positions ``max(0, p - sliding_window + 1)..p``; its own key and value must
    have been written.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; consecutive query heads share a KV head.
        kv_layer: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``.
        metadata: the step's sequences.
        scale: factor of the dot products.
        sliding_window: number of positions that a token sees; None means all.
        logit_softcap: scores become ``cap * tanh(score / cap)``.
        sinks: ``[num_heads]``, a logit of each head that takes part in the softmax and has no value.
        alibi_slopes: ``[num_heads]``; ``slope * (key position - p)`` is added to each score.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_blocks(kv_layer)
    if query.shape[2] != kv_layer.shape[4] or query.shape[1] % kv_layer.shape[2]:
        raise ValueError(
            f"query [tokens, heads, head_dim] is {tuple(query.shape)}; blocks have {kv_layer.shape[2]} "
            f"KV heads of {kv_layer.shape[4]}: head_dim must be equal and heads a multiple"
        )
    if query.dtype != kv_layer.dtype:
        raise ValueError(f"query is {query.dtype}, blocks are {kv_layer.dtype}: they must be equal")
    for name, each in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if each is not None and each.shape != query.shape[1:2]:
            raise ValueError(f"{name} is {tuple(each.shape)}: there are {query.shape[1]} query heads")
    output: torch.Tensor = torch.ops.quire.paged_attention(
        query,
        kv_layer,
        metadata.block_tables,
        metadata.query_starts,
        metadata.seq_lens,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
    )
    return output


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write the new tokens' keys and values ``[num_tokens, num_kv_heads, head_dim]`` into their slots.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_blocks(kv_layer)
    expected = (slot_mapping.shape[0], kv_layer.shape[2], kv_layer.shape[4])
    if tuple(key.shape) != expected or tuple(value.shape) != expected:
        raise ValueError(f"key and value must be {expected}, got {tuple(key.shape)} and {tuple(value.shape)}")
    if not key.dtype == value.dtype == kv_layer.dtype:
        raise ValueError(
            f"key, value and blocks differ in dtype: {key.dtype}, {value.dtype}, {kv_layer.dtype}"
        )
    torch.ops.quire.write_kv(key, value, kv_layer, slot_mapping)


def _check_blocks(kv_layer: torch.Tensor) -> None:
    if kv_layer.dtype not in _DTYPES:
        raise ValueError(f"blocks are {kv_layer.dtype}: there are kernels for {[*map(str, _DTYPES)]}")
    # A block's part of a layer is one run of bytes: only the blocks may lie apart.
    if kv_layer[0].numel() and not kv_layer[0].is_contiguous():
        raise ValueError(f"blocks must be contiguous from their second dimension on: {kv_layer.stride()}")
