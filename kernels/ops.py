"""The operations on paged KV blocks, with the implementation chosen by where the blocks are.

KV memory is one tensor ``kv[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``; a layer's view
is ``kv[:, layer]``.
"""

from __future__ import annotations

from types import ModuleType

import torch

from quire.kernels import cpu, reference
from quire.kernels.metadata import AttentionMetadata


def paged_attention(
    query: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    sinks: torch.Tensor | None = None,
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

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check_attention(query, kv_layer)
    output: torch.Tensor = _implementation(kv_layer).paged_attention(
        query,
        kv_layer,
        metadata,
        scale=scale,
        sliding_window=sliding_window,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )
    return output


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write the new tokens' keys and values ``[num_tokens, num_kv_heads, head_dim]`` into their slots.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    expected = (slot_mapping.shape[0], kv_layer.shape[2], kv_layer.shape[4])
    if tuple(key.shape) != expected or tuple(value.shape) != expected:
        raise ValueError(f"key and value must be {expected}, got {tuple(key.shape)} and {tuple(value.shape)}")
    if not key.dtype == value.dtype == kv_layer.dtype:
        raise ValueError(
            f"key, value and blocks differ in dtype: {key.dtype}, {value.dtype}, {kv_layer.dtype}"
        )
    _implementation(kv_layer).write_kv(key, value, kv_layer, slot_mapping)


def _check_attention(query: torch.Tensor, kv_layer: torch.Tensor) -> None:
    if query.shape[2] != kv_layer.shape[4] or query.shape[1] % kv_layer.shape[2]:
        raise ValueError(
            f"query [tokens, heads, head_dim] is {tuple(query.shape)}; blocks have {kv_layer.shape[2]} "
            f"KV heads of {kv_layer.shape[4]}: head_dim must be equal and heads a multiple"
        )
    if query.dtype != kv_layer.dtype:
        raise ValueError(f"query is {query.dtype}, blocks are {kv_layer.dtype}: they must be equal")


def _implementation(kv_layer: torch.Tensor) -> ModuleType:
    if kv_layer.is_cpu and kv_layer.dtype in (torch.float32, torch.bfloat16):
        return cpu
    # float16 has no arithmetic in Numba; it is rare on CPUs, and slow and right beats fast and wrong.
    return reference
