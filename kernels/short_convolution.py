"""Short convolutions: sums over the last inputs of each channel, read from KV blocks.

Blocks keep the inputs of such a layer like keys and values: those of the first half of the heads as keys, and
the others as values. A token's sum reads them there, whichever step wrote them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.kernels.metadata import AttentionMetadata


class Convolution(NamedTuple):
    """The weights of some channels of a layer with a short convolution.

    Attributes:
        taps: ``[num_taps, num_heads, head_dim]``; the last one belongs to the token itself.
        bias: ``[num_heads, head_dim]``; None if there is none.
    """

    taps: torch.Tensor
    bias: torch.Tensor | None


def short_convolution(
    inputs: torch.Tensor,
    kv_layer: torch.Tensor,
    metadata: AttentionMetadata,
    convolution: Convolution,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``sum(taps[k] * input of the token num_taps - 1 - k positions before) + bias`` for each token.

    The terms are added in this order, in float32 and without fused multiplications, and the sum is rounded
    once. There is no term for a position before the sequence. The inputs must have been written.

    Args:
        inputs: ``[num_tokens, num_heads, head_dim]``, those of the new tokens.
        kv_layer: ``[num_blocks, 2, num_heads / 2, block_size, head_dim]``.
        metadata: the step's sequences.
        convolution: its weights.
        kv_scales: float32 ``[num_blocks, 2, num_heads / 2]``, only with 8-bit blocks.

    Returns:
        ``[num_tokens, num_heads, head_dim]`` in the dtype of the inputs.
    """
    taps, bias = convolution
    tables, starts, block_size = metadata.block_tables, metadata.query_starts, kv_layer.shape[3]
    tokens = torch.arange(len(inputs), dtype=starts.dtype, device=starts.device)
    # Graphs pad a step with tokens of no sequence: these may get anything, but from memory that exists.
    rows = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(tables) - 1)
    indices = tokens + (metadata.seq_lens - starts[1:])[rows]
    past = indices[:, None] + torch.arange(1 - len(taps), 0, device=starts.device)
    places = past.clamp(0, tables.shape[1] * block_size - 1)
    blocks = tables[rows[:, None], places // block_size]
    found = kv_layer[blocks, :, :, places % block_size].float()
    if kv_scales is not None:
        found *= kv_scales[blocks][..., None]
    terms = (found.flatten(2, 3) * taps[:-1].float()).where((past >= 0)[..., None, None], 0.0)
    total = torch.zeros(inputs.shape, dtype=torch.float32, device=inputs.device)
    for term in (*terms.unbind(1), inputs.float() * taps[-1].float()):
        total += term
    return (total if bias is None else total + bias.float()).to(inputs.dtype)
