"""Reads the recipe of a model from its modules.

A model is refused if the recipe does not use one of its modules with weights. The recipe cannot show what a
module computes beyond its weights. The program's logits are therefore compared with the modules' logits
before it is used (see ``checked_recipe``).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from quire.engine.model.layers.experts import SharedMlp, shared_expert
from quire.engine.model.layers.latent_attention import HeadLinear, LatentExpansion, latent_expansion
from quire.engine.model.layers.packed_linear import PackedEmbedding, PackedLinear, embedding_scale
from quire.engine.model.layers.row_layers import KernelActivation, RowNorm
from quire.engine.model.program.recipe import (
    AttentionRecipe,
    LatentRecipe,
    LayerRecipe,
    MlpRecipe,
    NoRecipeError,
    Rotation,
    StepRecipe,
)
from quire.engine.model.program.state_recipe import StateRecipe, read_states
from quire.kernels.cpu import rows
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.stored_types import FLOATS, form_of_inputs
from quire.kernels.cpu.rows import Activation

Module = TypeVar("Module", bound=torch.nn.Module)
_INTERLEAVED = "apply_rotary_pos_emb_interleave"
_ROTATIONS = {"apply_rotary_pos_emb", _INTERLEAVED}
"""Functions of transformers that rotate keys of latent attention as the program does."""


def read_recipe(model: PreTrainedModel) -> StepRecipe:
    """Return the recipe of a model whose linear layers are packed.

    Raises:
        NoRecipeError: some part of the model is not of a known shape.
    """
    reader = _Reader(model)
    try:
        recipe = _read(reader, model)
    except AttributeError as error:
        problem = f"{_other_shape(model)}: {type(error.obj).__name__} has no {error.name}"
        raise NoRecipeError(problem) from error
    reader.check_nothing_is_left()
    return recipe


def _read(reader: _Reader, model: PreTrainedModel) -> StepRecipe:
    if hasattr(model, "transformer") and hasattr(model.transformer, "wpe"):
        return reader.read_gpt2()
    if hasattr(model, "model") and hasattr(model.model, "decoder"):
        return reader.read_opt()
    if hasattr(model, "model") and hasattr(model.model, "embed_tokens"):
        return reader.read_llama()
    raise NoRecipeError(_other_shape(model))


def _other_shape(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} has another shape than Llama, GPT-2 and OPT"


class _Reader:
    """Takes modules out of a model one by one, so that the unused ones are known at the end."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        self._taken: set[int] = set()

    def read_llama(self) -> StepRecipe:
        """Read a model of Llama's shape: Mistral, Qwen, Phi-3, Gemma and others."""
        config, base = self._model.config.get_text_config(), self._model.model
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(base.layers)
        attentions = [getattr(layer, "self_attn", None) for layer in base.layers]
        rotary = getattr(base, "rotary_emb", getattr(base, "pos_emb", None))
        takes_kind = rotary and "layer_type" in inspect.signature(rotary.forward).parameters
        names = sorted({kind for kind, each in zip(kinds, attentions, strict=True) if each is not None})
        rotation_names = [] if rotary is None else names if takes_kind else [""]
        layers = []
        for kind, layer, attention in zip(kinds, base.layers, attentions, strict=True):
            has_rotation = rotary and attention is not None and getattr(attention, "use_rope", True)
            index = rotation_names.index(kind if takes_kind else "") if has_rotation else None
            layers.append(self._llama_layer(layer, index))
        embedding = base.embed_tokens
        return StepRecipe(
            embedding=self._embedding(embedding),
            embedding_scale=_scale(embedding) * float(getattr(config, "embedding_multiplier", 1.0)),
            layers=tuple(layers),
            rotations=tuple(self._rotation(rotary, name) for name in rotation_names),
            final_norm=self._take(_first(base, "final_layernorm", "embedding_norm", "norm"), RowNorm),
            head=self._take(self._model.lm_head, PackedLinear),
            finish=_finish(config),
        )

    def _llama_layer(self, layer: Any, rotation: int | None) -> LayerRecipe:
        has_four_norms = hasattr(layer, "pre_feedforward_layernorm")
        mlp = _first(layer, "block_sparse_moe", "feed_forward", "shared_mlp", "mlp")
        if getattr(layer, "shared_mlp", None) not in (None, mlp):
            mlp = SharedMlp(mlp, layer.shared_mlp)
        mixer = _first(layer, "linear_attn", "mamba", "conv", "self_attn")
        scale = float(getattr(layer, "residual_multiplier", 1.0))
        return LayerRecipe(
            attention_norm=self._take(_first(layer, "operator_norm", "input_layernorm"), RowNorm),
            attention=self._llama_attention(mixer, rotation),
            after_attention_norm=(
                self._take(layer.post_attention_layernorm, RowNorm) if has_four_norms else None
            ),
            mlp_norm=self._take(
                _first(
                    layer,
                    "pre_feedforward_layernorm",
                    "pre_ff_layernorm",
                    "ffn_norm",
                    "post_attention_layernorm",
                ),
                RowNorm,
            ),
            mlp=self._llama_mlp(mlp),
            after_mlp_norm=self._optional_norm(layer, "post_feedforward_layernorm"),
            shared=self._shared_expert(mlp),
            attention_scale=float(getattr(layer, "attn_beta_factor", scale)),
            mlp_scale=float(getattr(layer, "mlp_beta_factor", scale)),
            residual_scales=(
                (float(layer.attn_alpha_factor), float(layer.mlp_alpha_factor))
                if hasattr(layer, "attn_alpha_factor")
                else None
            ),
        )

    def _llama_attention(
        self, attention: Any, rotation: int | None
    ) -> AttentionRecipe | StateRecipe | torch.nn.Module:
        states = read_states(attention)
        if states is not None:
            self._module(attention)
            return states
        if any(each.argval == "position_ids" for each in dis.get_instructions(type(attention).forward)):
            # Its queries may grow with the position, as in Ministral 3, beyond those of the check at load.
            return self._module(attention)
        if latent_expansion(attention) is not None:
            return self._latent_attention(attention, rotation)
        names = ("qkv_proj",) if hasattr(attention, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
        output = next((name for name in ("o_proj", "out_proj") if hasattr(attention, name)), "")
        parts = {name for name, each in attention.named_children() if _has_weights(each)}
        if parts - {"q_norm", "k_norm", "q_layernorm", "k_layernorm"} != {*names, output}:
            return self._module(attention)
        projections = tuple(self._take(getattr(attention, name), PackedLinear) for name in names)
        projected = self._take(getattr(attention, output), PackedLinear)
        excess = projections[0].out_features / projected.in_features if len(names) == 3 else 1
        if excess not in (1, 2):
            return self._module(attention)
        recipe = AttentionRecipe(
            number=_number(attention),
            projections=projections,
            query_norm=self._optional_norm(attention, "q_norm", "q_layernorm"),
            key_norm=self._optional_norm(attention, "k_norm", "k_layernorm"),
            is_gated=excess == 2,
            rotation=rotation,
            output=projected,
        )
        if hasattr(attention, "sinks"):
            # The calls of attention have them.
            self._taken.add(id(attention))
        return recipe

    def _latent_attention(self, attention: Any, rotation: int | None) -> AttentionRecipe | torch.nn.Module:
        parts = {name for name, each in attention.named_children() if _has_weights(each)}
        query = ("q_a_proj", "q_a_layernorm", "q_b_proj") if "q_a_proj" in parts else ("q_proj",)
        if parts - {"g_proj"} != {*query, "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj"}:
            return self._module(attention)
        names = [query[0], "kv_a_proj_with_mqa", *({"g_proj"} & parts)]
        expansion = self._take(attention.kv_b_proj, LatentExpansion)
        key_heads = self._take(expansion.key_heads, HeadLinear)
        value_heads = self._take(expansion.value_heads, HeadLinear)
        weights = attention.o_proj.packed, key_heads.packed, value_heads.packed
        rotations = {each for each in type(attention).forward.__code__.co_names if "apply_rotary" in each}
        is_known = rotations <= _ROTATIONS and all(form_of_inputs(each.stored) == FLOATS for each in weights)
        if not is_known or (len(names) == 3 and attention.g_proj.out_features != key_heads.num_heads):
            return self._module(attention)
        up = self._take(attention.q_b_proj, PackedLinear) if len(query) > 1 else None
        return AttentionRecipe(
            number=_number(attention),
            projections=tuple(self._take(getattr(attention, name), PackedLinear) for name in names),
            query_norm=None if up is None else self._take(attention.q_a_layernorm, RowNorm),
            key_norm=self._take(attention.kv_a_layernorm, RowNorm),
            rotation=rotation if rotations else None,
            output=self._take(attention.o_proj, PackedLinear),
            latents=LatentRecipe(
                up,
                key_heads,
                value_heads,
                _INTERLEAVED in rotations and getattr(attention.config, "rope_interleave", True),
            ),
        )

    def _llama_mlp(self, mlp: Any) -> MlpRecipe | torch.nn.Module:
        if hasattr(mlp, "experts"):
            return self._module(mlp)
        try:
            return self._gated_mlp(mlp)
        except NoRecipeError:
            return self._module(mlp)

    def _shared_expert(self, mlp: torch.nn.Module) -> MlpRecipe | None:
        expert = shared_expert(mlp)
        recipe = None if expert is None else self._llama_mlp(expert)
        return recipe if isinstance(recipe, MlpRecipe) else None

    def _module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._taken.update(map(id, module.modules()))
        return module

    def _gated_mlp(self, mlp: Any) -> MlpRecipe:
        if hasattr(mlp, "w1"):
            # LFM2 has no module for its activation.
            gate, up, down = (self._take(_child(mlp, name), PackedLinear) for name in ("w1", "w3", "w2"))
            return MlpRecipe(gate, up, KernelActivation(Activation.SILU), down)
        act_fn, down_proj, gate_up_proj = "act_fn", "down_proj", "gate_up_proj"
        if hasattr(mlp, "input_linear"):  # Granite
            act_fn, down_proj, gate_up_proj = "activation", "output_linear", "input_linear"
        elif not hasattr(mlp, act_fn):
            act_fn = "activation_fn"
        activation = self._take(_child(mlp, act_fn), KernelActivation)
        down = self._take(_child(mlp, down_proj), PackedLinear)
        if hasattr(mlp, gate_up_proj):
            both = self._take(getattr(mlp, gate_up_proj), PackedLinear)
            size = both.out_features // 2
            if size % UNIT:
                raise NoRecipeError(
                    f"half of {gate_up_proj} has {size} outputs, which is no multiple of {UNIT}"
                )
            return MlpRecipe(both, both, activation, down, size)
        up = self._take(_child(mlp, "up_proj"), PackedLinear)
        if not hasattr(mlp, "gate_proj"):
            return MlpRecipe(up, None, activation, down)
        gate = self._take(mlp.gate_proj, PackedLinear)
        return MlpRecipe(gate, up, activation, down)

    def read_gpt2(self) -> StepRecipe:
        """Read a model of GPT-2's shape."""
        base = self._model.transformer
        layers = [
            LayerRecipe(
                attention_norm=self._take(layer.ln_1, RowNorm),
                attention=AttentionRecipe(
                    number=_number(layer.attn),
                    projections=(self._take(layer.attn.c_attn, PackedLinear),),
                    output=self._take(layer.attn.c_proj, PackedLinear),
                ),
                mlp_norm=self._take(layer.ln_2, RowNorm),
                mlp=self._plain_mlp(layer.mlp.c_fc, layer.mlp.act, layer.mlp.c_proj),
            )
            for layer in base.h
        ]
        return self._with_positions(base.wte, base.wpe, 0, layers, base.ln_f)

    def read_opt(self) -> StepRecipe:
        """Read a model of OPT's shape."""
        base = self._model.model.decoder
        layers = [
            LayerRecipe(
                attention_norm=self._take(layer.self_attn_layer_norm, RowNorm),
                attention=AttentionRecipe(
                    number=_number(layer.self_attn),
                    projections=tuple(
                        self._take(_child(layer.self_attn, name), PackedLinear)
                        for name in ("q_proj", "k_proj", "v_proj")
                    ),
                    query_scale=layer.self_attn.scaling,
                    output=self._take(layer.self_attn.out_proj, PackedLinear),
                ),
                mlp_norm=self._take(layer.final_layer_norm, RowNorm),
                mlp=self._plain_mlp(layer.fc1, layer.activation_fn, layer.fc2),
            )
            for layer in base.layers
        ]
        positions = base.embed_positions
        return self._with_positions(
            base.embed_tokens, positions, positions.offset, layers, base.final_layer_norm
        )

    def _with_positions(
        self, tokens: Any, positions: Any, offset: int, layers: list[LayerRecipe], final_norm: Any
    ) -> StepRecipe:
        return StepRecipe(
            embedding=self._embedding(tokens),
            embedding_scale=_scale(tokens),
            position_embedding=self._take(positions, torch.nn.Embedding).weight,
            position_offset=offset,
            layers=tuple(layers),
            final_norm=None if final_norm is None else self._take(final_norm, RowNorm),
            head=self._take(self._model.lm_head, PackedLinear),
        )

    def _plain_mlp(self, first: Any, activation: Any, second: Any) -> MlpRecipe:
        up, down = self._take(first, PackedLinear), self._take(second, PackedLinear)
        return MlpRecipe(up, None, self._take(activation, KernelActivation), down)

    def _embedding(self, module: Any) -> torch.Tensor | PackedEmbedding:
        if isinstance(module, PackedEmbedding):
            return self._take(module, PackedEmbedding)
        return self._take(module, torch.nn.Embedding).weight

    def _optional_norm(self, parent: Any, *names: str) -> RowNorm | None:
        norm = next((getattr(parent, name) for name in names if hasattr(parent, name)), None)
        return None if norm is None else self._take(norm, RowNorm)

    def _rotation(self, module: Any, kind: str) -> Rotation:
        self._taken.add(id(module))
        dtype, arguments = self._model.dtype, (kind,) if kind else ()

        def rotate(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = module(torch.empty((1, 1), dtype=dtype), positions[None], *arguments)
            frequencies = getattr(module, "inv_freq", None)
            if frequencies is not None and both[0].shape[-1] == len(frequencies):
                # gpt-oss rotates both halves by the same numbers.
                both = tuple(torch.cat((each, each), dim=-1) for each in both)
            cosines, sines = both
            return cosines[0], sines[0]

        return rotate

    def _take(self, module: Any, kind: type[Module]) -> Module:
        if not isinstance(module, kind):
            name = self._names.get(id(module), "a part")
            raise NoRecipeError(f"{name} is a {type(module).__name__}, not a {kind.__name__}")
        self._taken.add(id(module))
        return module

    def check_nothing_is_left(self) -> None:
        """Raise NoRecipeError if a module with weights has no place in the recipe."""
        for name, module in self._model.named_modules():
            if _has_own_weights(module) and id(module) not in self._taken:
                raise NoRecipeError(f"{name} ({type(module).__name__}) has no place in it")


def _has_own_weights(module: torch.nn.Module) -> bool:
    tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return isinstance(module, PackedLinear | RowNorm) or any(True for _ in tensors)


def _has_weights(module: torch.nn.Module) -> bool:
    return any(map(_has_own_weights, module.modules()))


def _number(attention: Any) -> int:
    """Return the number of a layer's call of attention."""
    numbers: list[int] = attention.kv_layers
    if len(numbers) != 1:
        raise NoRecipeError(f"{type(attention).__name__} calls attention {len(numbers)} times")
    return numbers[0]


def _first(layer: Any, *names: str) -> Any:
    """Return the first child that a layer has; the error is about the last name."""
    for name in names[:-1]:
        if getattr(layer, name, None) is not None:
            return getattr(layer, name)
    return getattr(layer, names[-1])


def _child(parent: Any, name: str) -> Any:
    if not hasattr(parent, name):
        raise NoRecipeError(f"{type(parent).__name__} has no {name}")
    return getattr(parent, name)


def _scale(embedding: Any) -> float:
    return embedding.scale if isinstance(embedding, PackedEmbedding) else embedding_scale(embedding)


def _finish(config: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what a model of Llama's shape does to its logits; None if it does nothing."""
    softcap = getattr(config, "final_logit_softcapping", None)
    if softcap:
        return lambda logits: rows.activation(logits / softcap, Activation.TANH) * softcap
    divisor = getattr(config, "logits_scaling", 1.0)
    return None if divisor == 1.0 else lambda logits: logits / divisor
