"""Latent attention (MLA, DeepSeek-AI, 2024, arXiv 2405.04434) over the latents themselves.

A layer with latent attention computes one latent and one rotated key for each token, which all heads share.
transformers keeps these in its cache, and before each attention expands all of them to the keys and values
of each head. Both are linear, so they can be moved to the other side of the dot products: instead of the
keys, the query is multiplied by the key's weight, and instead of the values, the weighted sum of the latents
is multiplied by the value's weight. Blocks then hold only the latents and the rotated keys, and attention
reads each of them once for all heads.

This needs more arithmetic than expanded heads for a long prompt. It is used for all tokens nevertheless:
the two forms round differently, and a token must get the same bits in a prompt and in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from quire.engine.model.layers.packed_linear import pack_weight
from quire.kernels.cpu.products.linear import sums
from quire.kernels.cpu.products.packed_weight import UNIT, PackedWeight


class HeadLinear(torch.nn.Module):
    """A linear layer of each head on the CPU, all in one packed weight.

    Args:
        weight: ``[num_heads, out_features, in_features]``.
        weight_dtype, arithmetic: as for ``PackedLinear``.
    """

    def __init__(self, weight: torch.Tensor, weight_dtype: str, arithmetic: str) -> None:
        super().__init__()
        self.num_heads, self.out_features, _ = weight.shape
        padded = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -self.out_features % UNIT))
        self.packed: PackedWeight = pack_weight("kv_b_proj", padded.flatten(0, 1), weight_dtype, arithmetic)

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[num_heads, out_features, in_features]``; each access unpacks it again."""
        heads: torch.Tensor = self.packed.unpack().unflatten(0, (self.num_heads, -1))
        return heads[:, : self.out_features]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, num_heads, out_features]`` for ``[num_tokens, num_heads, in_features]``."""
        outputs: torch.Tensor = sums(inputs, self.packed, None, num_heads=self.num_heads)
        heads: torch.Tensor = outputs.unflatten(1, (self.num_heads, -1))
        return heads[..., : self.out_features].to(inputs.dtype)


class GpuHeadLinear(torch.nn.Module):
    """A linear layer of each head on a GPU; see ``HeadLinear``."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.detach().contiguous(), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``[num_tokens, num_heads, out_features]`` for ``[num_tokens, num_heads, in_features]``."""
        return torch.bmm(inputs.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


MakeHeads = Callable[[torch.Tensor], HeadLinear | GpuHeadLinear]
"""Makes a layer from its weight ``[num_heads, out_features, in_features]``."""


class LatentExpansion(torch.nn.Module):
    """The layer that expands latents to keys and values (``kv_b_proj``), divided into these two.

    Args:
        weight: ``[num_heads * (key_dim + value_dim), latent_dim]``.
        key_dim: elements of a head's key that are not rotated.
        value_dim: elements of a head's value.
        head_linear: makes the linear layers of heads from weights.
    """

    def __init__(self, weight: torch.Tensor, key_dim: int, value_dim: int, head_linear: MakeHeads) -> None:
        super().__init__()
        self.key_dim, self.value_dim, self.latent_dim = key_dim, value_dim, weight.shape[1]
        keys, values = weight.unflatten(0, (-1, key_dim + value_dim)).split([key_dim, value_dim], dim=1)
        self.key_heads = head_linear(keys.transpose(1, 2))
        self.value_heads = head_linear(values)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Expand latents, as the check at load time needs it for the model's own attention."""
        weight = torch.cat([self.key_heads.weight.transpose(1, 2), self.value_heads.weight], dim=1)
        return torch.nn.functional.linear(latents, weight.flatten(0, 1))

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries ``[num_tokens, num_heads, key_dim + rotated]`` in the form that attends to rows."""
        return torch.cat([self.key_heads(query[..., : self.key_dim]), query[..., self.key_dim :]], dim=-1)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Return values ``[num_tokens, num_heads, value_dim]`` of one latent for each token and head."""
        values: torch.Tensor = self.value_heads(latents)
        return values


def keep_latents(model: torch.nn.Module, head_linear: MakeHeads) -> None:
    """Let the layers with latent attention pass rows of latents to attention.

    A row ``[latent, rotated key]`` is the key, and the latent is the value. Eager attention still gets
    expanded heads.
    """
    layers: list[Any] = list(model.modules())
    for layer in layers:
        expansion = getattr(layer, "kv_b_proj", None)
        if hasattr(layer, "expand_kv") and type(expansion) is torch.nn.Linear and expansion.bias is None:
            sizes = int(layer.qk_nope_head_dim), int(layer.v_head_dim)
            layer.kv_b_proj = LatentExpansion(expansion.weight, *sizes, head_linear)
            layer.expand_kv = partial(_rows_of_latents, layer, layer.expand_kv)


def latent_expansion(layer: torch.nn.Module) -> LatentExpansion | None:
    """Return the expansion of a layer that passes rows of latents to attention; None for other layers."""
    expansion = getattr(layer, "kv_b_proj", None)
    return expansion if isinstance(expansion, LatentExpansion) else None


def _rows_of_latents(
    layer: Any, expand: Any, latents: torch.Tensor, rotated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values for attention, from ``[batch, 1, num_tokens, latent_dim]`` and rotated keys."""
    if layer.config._attn_implementation == "eager":
        expanded: tuple[torch.Tensor, torch.Tensor] = expand(latents, rotated)
        return expanded
    return torch.cat([latents, rotated], dim=-1), latents
