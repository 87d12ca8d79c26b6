"""Routers of experts with fewer operators than transformers' own code."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from quire.engine.model.layers.packed_linear import PackedLinear
from quire.kernels.cpu import rows
from quire.kernels.cpu.products.packing import pack
from quire.kernels.cpu.rows import Activation
from quire.kernels.torch_functions import without_replacements

Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Function that returns the logits ``[num_tokens, num_experts]``, the weights of the chosen experts and their
numbers, each ``[num_tokens, num_chosen]``."""


_READ = ("e_score_correction_bias", "routed_scaling_factor", "norm_topk_prob", "top_k")


def ungrouped_route(router: Any) -> Route | None:
    """Return what a router computes; None if it is not one of these, or chooses among groups of experts.

    A token chooses the experts with the highest scores, the sigmoids of its logits plus a correction. The
    weights are the scores without it.
    """
    if getattr(router, "num_group", 0) != 1 or not all(hasattr(router, name) for name in _READ):
        return None
    linear = PackedLinear(pack(router.weight.detach().float()))
    correction, factor = router.e_score_correction_bias, router.routed_scaling_factor

    def route(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(hidden_states.reshape(-1, linear.in_features).float())
        scores = rows.activation(logits, Activation.SIGMOID)
        chosen = torch.topk(scores + correction, router.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * factor, chosen

    return route


def softmax_route(router: Any) -> Route | None:
    """Return what a router computes whose weights are the largest of the softmax of its logits.

    Returns None if it lacks what such routers have; another router may have all of it, too.
    """
    # The weight comes last, since a packed layer would unpack it to answer.
    if not all(hasattr(router, name) for name in ("top_k", "weight")) or hasattr(router, "bias"):
        return None
    if list(signature(router.forward).parameters) != ["hidden_states"]:
        return None
    linear, is_normalized = (
        PackedLinear(pack(router.weight.detach())),
        getattr(router, "norm_topk_prob", True),
    )

    @without_replacements
    def route(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = linear(hidden_states.reshape(-1, linear.in_features))
        scores = torch.softmax(logits, dim=-1, dtype=torch.float)
        weights, chosen = torch.topk(scores, router.top_k, dim=-1)
        if is_normalized:
            weights /= weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    return route
