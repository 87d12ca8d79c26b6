"""Layers with a short convolution, as in LFM2: they keep their inputs in KV blocks.

Such a layer sums the last few inputs of each channel, so its blocks are those of a layer with a window of
that many tokens. Code that moves, shares, drops or restores blocks needs no special case. The inputs of a
token fill the keys and values of one layer or of several.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.engine.model.layers.attention import Attend
from quire.kernels.short_convolution import Convolution


def run_short_convolution(layer: Any, attend: Attend, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Run a layer like ``Lfm2ShortConv`` with the inputs of earlier tokens from KV blocks.

    Args:
        layer: the layer.
        attend: attention with an argument ``convolution``; see ``attention.attend``.
        hidden_states: ``[1, num_tokens, num_channels]``.
    """
    config = layer.config
    num_heads = 2 * config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if not hasattr(layer, "convolutions"):
        layer.convolutions = _convolutions(layer.conv, num_heads, head_dim)
    factor, output_factor, hidden_states = layer.in_proj(hidden_states).chunk(3, dim=-1)
    sums = []
    inputs = _parts((factor * hidden_states)[0], num_heads, head_dim)
    for part, convolution in zip(inputs, layer.convolutions, strict=True):
        query = part.transpose(0, 1)[None]
        key, value = query.chunk(2, dim=1)
        of_part = attend(query, key, value, sliding_window=len(convolution.taps), convolution=convolution)
        sums.append(of_part.flatten(2))
    summed = torch.cat(sums, dim=-1)[..., : hidden_states.shape[-1]]
    output: torch.Tensor = layer.out_proj(output_factor * summed)
    return output


def _convolutions(conv: Any, num_heads: int, head_dim: int) -> list[Convolution]:
    """Return the weights of each part of the channels."""
    taps = _parts(conv.weight[:, 0].T, num_heads, head_dim)
    if conv.bias is None:
        return [Convolution(each, None) for each in taps]
    biases = _parts(conv.bias[None], num_heads, head_dim)
    return [Convolution(*both) for both in zip(taps, (each[0] for each in biases), strict=True)]


def _parts(channels: torch.Tensor, num_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """Divide ``[rows, num_channels]`` into ``[rows, num_heads, head_dim]`` each; zeros fill the last part."""
    missing = -channels.shape[-1] % (num_heads * head_dim)
    padded = torch.nn.functional.pad(channels, (0, missing))
    return torch.unbind(padded.unflatten(-1, (-1, num_heads, head_dim)), 1)
