"""Experts on the CPU: a token gets the same bits whichever other tokens its experts get.

transformers calls them through its experts interface. The weights of each expert are packed at load time.

Each of several ranks has whole experts, and all ranks compute the router. The alternative, a slice of every
expert's inner width, balances the ranks better, but then each segment of the width has results of its own for
each token and expert: one process would write up to 8 times the results, or ranks would exchange one row for
each of a token's experts instead of one for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from quire.engine.model.check import UnsupportedModelError, refusing
from quire.engine.model.collectives import Collectives, pieces
from quire.engine.model.layers.llama4_layers import use_experts_interface
from quire.engine.model.layers.packed_linear import pack_weight
from quire.engine.model.layers.row_layers import KernelActivation
from quire.engine.model.parallel_shares import DividedExperts
from quire.kernels.cpu import rows
from quire.kernels.cpu.products.grouped_linear import WeightGroup, group_choices, grouped_sums
from quire.kernels.cpu.products.packed_weight import PackedWeight
from quire.kernels.cpu.rows import Gate, Norm
from quire.kernels.cpu.weighted_sums import Int64s, weighted_sums
from quire.kernels.torch_functions import without_replacements

_IMPLEMENTATION = "quire"
_TOLERANCE = 0.3
"""Largest relative error of packed experts; wrong computations have errors of about 1, 4-bit weights 0.1."""
_NAMES = ("gate_up_proj", "up_proj", "down_proj")
_NUM_TESTED = 4
"""Tokens with which packed experts are compared with the module's own code."""


@dataclass(frozen=True)
class ExpertsPart:
    """Which of a layer's experts a process computes.

    Attributes:
        first: the first expert.
        segments: the segment of each of the experts, counted from the process's first one.
        pieces: the first segment of each piece of the process, and the number of its segments.
        borders: the first segment of each process, and the number of segments.
        collectives: those of the ranks; None if there is one process.
    """

    first: int
    segments: Int64s
    pieces: Int64s
    borders: Int64s
    collectives: Collectives | None

    @classmethod
    def of(cls, divided: DividedExperts, collectives: Collectives | None = None) -> ExpertsPart:
        """Return the part of a rank, or all experts."""
        rank, num_ranks = (0, 1) if collectives is None else (collectives.rank, collectives.num_ranks)
        shares, own = divided.shares, divided.own(rank, num_ranks)
        borders = np.array(shares.borders(num_ranks), np.int64)
        own_pieces = [piece.start for piece in pieces(borders, rank)]
        num_own = borders[rank + 1] - borders[rank]
        segments = np.repeat(
            np.arange(num_own),
            [
                (segment + 1) * divided.num_experts // shares.num_segments
                - segment * divided.num_experts // shares.num_segments
                for segment in range(borders[rank], borders[rank + 1])
            ],
        )
        return cls(own.start, segments, np.array([*own_pieces, num_own], np.int64), borders, collectives)

    def add(self, partials: torch.Tensor) -> torch.Tensor:
        """Return the sum of the pieces ``[num_pieces, num_tokens, width]`` of all processes.

        Raises:
            RanksError: a rank has failed.
        """
        if self.collectives is None:
            return partials[0]
        width, padded = partials.shape[2], self.collectives.memory.sizes.sum_width
        partials = torch.nn.functional.pad(partials, (0, padded - width))
        return self.collectives.sum(partials.unbind(), self.borders)[:, :width]


@dataclass(frozen=True)
class PackedExperts:
    """The weights of the first layer of each expert, which includes its gate, and of the second.

    Attributes:
        part: which experts these are.
    """

    up: WeightGroup
    down: WeightGroup
    part: ExpertsPart


@without_replacements
def compute_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of the results of each token's experts.

    Args:
        module: the experts.
        hidden_states: ``[num_tokens, hidden_size]``.
        top_k_index: ``[num_tokens, num_chosen]``. A number that no expert has adds nothing.
        top_k_weights: factors of the same shape.

    Raises:
        RanksError: a rank has failed.
    """
    packed: PackedExperts = module.packed
    part, num_choices = packed.part, top_k_index.shape[1]
    groups = group_choices(top_k_index.numpy(), part.first, len(part.segments))
    own = torch.from_numpy(groups.choices // num_choices)
    values = grouped_sums(hidden_states[own], packed.up, groups.ends).to(hidden_states.dtype)
    values = _activated(module, values)
    values = grouped_sums(values, packed.down, groups.ends)
    if module.has_post_expert_norm:
        values = module.post_expert_norm(values.to(hidden_states.dtype)).float()
    factors = top_k_weights.reshape(-1)[torch.from_numpy(groups.choices)].float()
    partials = weighted_sums(values, factors, part.segments[groups.weights], groups.places, part.pieces)
    return part.add(partials).to(hidden_states.dtype)


def _activated(module: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the activation of values ``[num_rows, width]``, or values times that of their gates."""
    has_default_gate = module.has_gate and type(module)._apply_gate is _default_apply_gate
    if has_default_gate and isinstance(module.act_fn, KernelActivation):
        gates, values = values.chunk(2, dim=1)
        return rows.norm(values, Norm.NONE, None, None, 0.0, gate=Gate(gates, module.act_fn.kind))
    # This is the module's own code, whose functions may need replacements.
    with torch._C._EnableTorchFunction():
        activated: torch.Tensor = module._apply_gate(values) if module.has_gate else module.act_fn(values)
    return activated


def divide_experts(module: Any, divided: DividedExperts, collectives: Collectives) -> None:
    """Let a rank add the results of all ranks to those of its own packed experts."""
    module.packed = replace(module.packed, part=ExpertsPart.of(divided, collectives))


def register() -> None:
    """Register the implementation of packed experts with transformers; calling this again does nothing."""
    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, compute_experts)


@torch.inference_mode()
def pack_experts(
    model: torch.nn.Module,
    weight_dtype: str,
    arithmetic: str,
    stored: Mapping[str, list[PackedWeight]] = MappingProxyType({}),
) -> None:
    """Pack the weights of a model's experts on the CPU, and compute them by ``compute_experts``.

    Args:
        model: the model.
        weight_dtype: "auto" (the model's own), "w8a8" or a key of ``QUANTIZED``.
        arithmetic: the order of sums of weights that are not quantized, see ``pack``.
        stored: weights that the checkpoint has packed already, by the names of the model's parameters.

    Raises:
        UnsupportedModelError: the experts compute something else than transformers' interface says.
        SettingError: the weights cannot be quantized.
    """
    experts = _find_experts(model)
    for module in experts.values():
        module.config._experts_implementation = "eager"
    for path, module in experts.items():
        own = {name: stored.get(f"{path}.{name}") for name in _NAMES}
        for name, weights in own.items():
            if weights is not None:
                # The test needs the plain weights of this module.
                stacked = torch.stack([each.unpack() for each in weights])
                plain = stacked.transpose(1, 2) if module.is_transposed else stacked
                setattr(module, name, torch.nn.Parameter(plain, requires_grad=False))
        test = _test_inputs(module)
        with refusing(f"has experts that need other arguments, {type(module).__name__}"):
            expected = module(*test).float()
        names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
        up, down = (_pack(module, name, weight_dtype, arithmetic, own[name]) for name in names)
        module.packed = PackedExperts(up, down, ExpertsPart.of(DividedExperts(module.num_experts)))
        error = (compute_experts(module, *test).float() - expected).norm() / expected.norm()
        if not error <= _TOLERANCE:
            raise UnsupportedModelError(
                f"the results of {type(module).__name__} differ by {error:.0%} from transformers' interface"
            )
    for module in experts.values():
        module.config._experts_implementation = _IMPLEMENTATION


def packable_experts(model: torch.nn.Module) -> set[str]:
    """Return the names of the parameters that only become packed weights of experts."""
    return {f"{path}.{name}" for path in _find_experts(model) for name in _NAMES}


def _find_experts(model: torch.nn.Module) -> dict[str, Any]:
    use_experts_interface(model)
    return {path: each for path, each in model.named_modules() if hasattr(each, "has_post_expert_norm")}


def _pack(
    module: Any, name: str, weight_dtype: str, arithmetic: str, weights: list[PackedWeight] | None
) -> WeightGroup:
    """Delete a parameter of experts; return its weights, which are packed unless they are given."""
    stacked = getattr(module, name).detach()
    if module.is_transposed:
        stacked = stacked.transpose(1, 2)
    weights = weights or [pack_weight(name, each, weight_dtype, arithmetic) for each in stacked]
    biases = getattr(module, f"{name}_bias") if module.has_bias else None
    delattr(module, name)
    return WeightGroup(weights, biases)


def _test_inputs(module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs of experts: tokens that each choose two neighboring experts."""
    down = module.down_proj
    generator = torch.Generator().manual_seed(1)
    hidden_size = down.shape[2 if module.is_transposed else 1]
    hidden_states = torch.randn((_NUM_TESTED, hidden_size), generator=generator).to(down.dtype)
    first = torch.arange(_NUM_TESTED)[:, None]
    top_k_index = torch.cat([first + 1, first], dim=1) % module.num_experts
    weights = torch.rand(top_k_index.shape, generator=generator).to(down.dtype)
    return hidden_states, top_k_index, weights


class SharedMlp(torch.nn.Module):
    """Experts, and the one of all tokens that a layer of Granite has beside their module."""

    def __init__(self, experts: torch.nn.Module, shared_expert: torch.nn.Module) -> None:
        super().__init__()
        self.experts, self.shared_expert = experts, shared_expert

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the sum of both for ``[1, num_tokens, hidden_size]``."""
        total: torch.Tensor = self.experts(inputs) + self.shared_expert(inputs)
        return total


def shared_expert(mlp: torch.nn.Module) -> torch.nn.Module | None:
    """Return the expert of all tokens in a module of experts; None if there is none."""
    if not hasattr(mlp, "experts"):
        return None
    return getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
