"""What a step's program needs to know of a model.

A recipe covers decoders of Llama's shape and GPT-2's: a layer has a norm, attention, another norm and an MLP,
and adds the results of attention and of the MLP to the residual stream. An MLP with experts, and what takes
the place of attention, such as a short convolution, stay modules, which are called between two parts of the
program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.engine.model.layers.latent_attention import HeadLinear
from quire.engine.model.layers.packed_linear import PackedEmbedding, PackedLinear
from quire.engine.model.layers.row_layers import KernelActivation, RowNorm
from quire.engine.model.program.state_recipe import StateRecipe

Rotation = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function that returns the cosines and sines ``[num_positions, rotary_dim]`` of some positions."""


class NoRecipeError(Exception):
    """A part of the model has no known shape; the message names it."""


@dataclass(frozen=True)
class MlpRecipe:
    """``down(activation(gate) * up)``; without up, ``down(activation(gate))``.

    Attributes:
        gate: the first linear layer.
        up: the layer by which the activation is multiplied; None if there is none.
        first_up_column: first column of ``up`` that is used, if it is the same layer as ``gate``; else 0.
    """

    gate: PackedLinear
    up: PackedLinear | None
    activation: KernelActivation
    down: PackedLinear
    first_up_column: int = 0

    @property
    def size(self) -> int:
        """Number of outputs of the activation."""
        return self.first_up_column or self.gate.out_features


@dataclass(frozen=True)
class LatentRecipe:
    """What latent attention has beside the parts of other attention.

    Attributes:
        query_up: the layer that expands queries; None if there is none.
        key_heads: multiplies a query by the weight of its head's keys.
        value_heads: computes each head's value from a latent.
        is_interleaved: whether neighbors are rotated, and not both halves of a key.
    """

    query_up: PackedLinear | None
    key_heads: HeadLinear
    value_heads: HeadLinear
    is_interleaved: bool

    @property
    def latent_dim(self) -> int:
        """Number of elements of a latent."""
        return self.key_heads.out_features


@dataclass(frozen=True)
class AttentionRecipe:
    """Attention.

    Attributes:
        number: the number of its call of attention, see ``KvHeads``.
        projections: the linear layers of queries, keys and values, or one for all of them. With latent
            attention, those of queries, of latents with rotated keys, and perhaps of a gate for each head.
        query_norm, key_norm: with latent attention, those before ``query_up`` and of the latents.
        is_gated: whether a gate, by whose sigmoid a head's result is multiplied, follows each head's query.
        query_scale: factor of the queries, in addition to the one that attention applies.
        rotation: index of the layer's rotation in ``StepRecipe.rotations``; None if it has none.
    """

    number: int
    projections: tuple[PackedLinear, ...]
    output: PackedLinear
    query_norm: RowNorm | None = None
    key_norm: RowNorm | None = None
    is_gated: bool = False
    query_scale: float = 1.0
    rotation: int | None = None
    latents: LatentRecipe | None = None


@dataclass(frozen=True)
class LayerRecipe:
    """One layer.

    Attributes:
        attention: a module if it has another shape, or is something else.
        mlp: a module if it has experts.
        shared: the expert of all tokens, which the program computes for this module; None if there is none.
        attention_scale, mlp_scale: factors of what they add to the residual stream.
        residual_scales: with these factors, the results of ``attention_norm`` and ``mlp_norm`` replace the
            residual stream; None if it stays as it is.
    """

    attention_norm: RowNorm
    attention: AttentionRecipe | StateRecipe | torch.nn.Module
    mlp_norm: RowNorm
    mlp: MlpRecipe | torch.nn.Module
    after_attention_norm: RowNorm | None = None
    after_mlp_norm: RowNorm | None = None
    shared: MlpRecipe | None = None
    attention_scale: float = 1.0
    mlp_scale: float = 1.0
    residual_scales: tuple[float, float] | None = None


@dataclass(frozen=True)
class StepRecipe:
    """A whole model.

    Attributes:
        embedding: ``[vocab_size, hidden_size]``, or the packed output layer's weight.
        position_embedding: ``[num_positions + position_offset, hidden_size]``; None if there is none.
        rotations: the different rotations of the layers.
        final_norm: None if there is none.
        finish: function of the logits, such as a soft cap.
    """

    embedding: torch.Tensor | PackedEmbedding
    embedding_scale: float
    layers: tuple[LayerRecipe, ...]
    final_norm: RowNorm | None
    head: PackedLinear
    rotations: tuple[Rotation, ...] = ()
    position_embedding: torch.Tensor | None = None
    position_offset: int = 0
    finish: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self.head.packed.dtype

    @property
    def attentions(self) -> list[AttentionRecipe]:
        """Those that are no modules."""
        return [each.attention for each in self.layers if isinstance(each.attention, AttentionRecipe)]

    @property
    def latents(self) -> list[LatentRecipe]:
        """Those of latent attention that is no module."""
        return [each.latents for each in self.attentions if each.latents is not None]

    @property
    def states(self) -> list[StateRecipe]:
        """The layers with a state that are no modules."""
        return [each.attention for each in self.layers if isinstance(each.attention, StateRecipe)]

    def without_states(self) -> StepRecipe:
        """Return the recipe in which layers with a state are modules."""
        layers = [
            replace(each, attention=each.attention.module)
            if isinstance(each.attention, StateRecipe)
            else each
            for each in self.layers
        ]
        return replace(self, layers=tuple(layers))

    @property
    def mlps(self) -> list[MlpRecipe]:
        """The MLPs that are no modules."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MlpRecipe)]

    @property
    def uses_torch(self) -> bool:
        """Whether torch approximates something: in modules, or the rates at which states decay, at load."""
        return self.has_modules or bool(self.states)

    @property
    def has_modules(self) -> bool:
        """Whether modules compute a part of some layers."""
        return len(self.attentions) + len(self.states) + len(self.mlps) < 2 * len(self.layers)

    @property
    def linears(self) -> list[PackedLinear]:
        """The linear layers that the program computes; the output layer only if there are no others."""
        of_attention = [layer for each in self.attentions for layer in (*each.projections, each.output)]
        of_attention += [each.query_up for each in self.latents if each.query_up is not None]
        of_attention += [layer for each in self.states for layer in each.linears]
        mlps = self.mlps + [each.shared for each in self.layers if each.shared is not None]
        of_mlps = [layer for each in mlps for layer in (each.gate, each.up or each.gate, each.down)]
        return of_attention + of_mlps or [self.head]
