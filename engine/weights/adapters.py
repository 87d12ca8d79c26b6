"""Loads adapters (LoRA) in the format of PEFT, for models that run as one program on the CPU.

If a model is divided among ranks, rank 0 reads an adapter and each rank places it. A rank has the rows of B
for its own outputs, and all of A: inputs that the ranks divide are gathered before A is multiplied by them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file

from quire.engine.model.collectives import Collectives
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.parallel_plan import Division
from quire.engine.model.program.recipe import StepRecipe
from quire.engine.weights.digest import describe_tensor
from quire.engine.weights.loader import LoadedModel
from quire.kernels.cpu.products.low_rank import LINEARS, UPDATE, pack_a, pack_b
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.metadata import Adapter
from quire.models.file_checks import damaged, read_object
from quire.models.safetensors_header import read_safetensors
from quire.models.source import find_model

__all__ = ["Adapter", "UnsupportedAdapterError", "load_adapter"]

MAX_RANK = 512
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
"""Fields of an adapter's configuration that change what it computes."""
_INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")
"""Ways to initialize an adapter that leave the model's own weights as they are."""


class UnsupportedAdapterError(ValueError):
    """The adapter, or an adapter of this model, cannot be served; the message names the reason."""


class _Place(NamedTuple):
    """Units of a packed linear layer that one linear layer of the step computes; its update's index."""

    update: int
    first_unit: int
    num_units: int


class _Target(NamedTuple):
    """A linear layer that can have an adapter.

    Attributes:
        shape: outputs and inputs of the whole layer.
        own_outputs: those of this rank.
        places: where the steps compute it.
    """

    shape: tuple[int, int]
    own_outputs: slice
    places: list[_Place]


class _Update(NamedTuple):
    """A and B of one linear layer, as they are stored, and the factor of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float


class AdapterWeights(NamedTuple):
    """The weights of an adapter, by the names of their linear layers, and their digest."""

    digest: str
    updates: dict[str, _Update]


def check_adaptable(model: LoadedModel) -> StepRecipe:
    """Return the recipe of a model that can have adapters.

    Raises:
        UnsupportedAdapterError: it cannot; the message says why.
    """
    if model.module.device.type != "cpu":
        raise UnsupportedAdapterError("adapters run on the CPU only")
    recipe = model.recipe
    if recipe is None or recipe.uses_torch or recipe.latents:
        raise UnsupportedAdapterError(
            "adapters need a model that runs as one program without latent attention and states, and "
            f"{model.module.config.model_type} does not"
        )
    return recipe


def load_adapter(path: str, model: LoadedModel) -> Adapter:
    """Load an adapter for a model that is not divided among ranks; see ``read_adapter``."""
    return place_adapter(read_adapter(path, model), model)


def read_adapter(path: str, model: LoadedModel) -> AdapterWeights:
    """Read an adapter, and check that it is one of this model.

    Args:
        path: a folder in PEFT's format, or a hub id.

    Raises:
        UnsupportedAdapterError: the adapter cannot be served, or not with this model.
        OSError: there is no such adapter, or a file of it is missing or damaged.
    """
    targets = _targets(check_adaptable(model), model)
    folder = find_model(path, (_CONFIG, _WEIGHTS))
    config = read_object(folder / _CONFIG)
    _check_config(config)
    read_safetensors(folder / _WEIGHTS)
    state = hashlib.sha256()
    updates = {}
    for name, (a, b) in sorted(_pairs(folder / _WEIGHTS).items()):
        if name not in targets:
            raise UnsupportedAdapterError(f"{name} is no linear layer of this model that can have an adapter")
        _check_shapes(name, a, b, targets[name].shape)
        _check_gathered(name, a.shape[1], model.collectives)
        updates[name] = _Update(a, b, _scale(name, len(a), config))
        state.update(describe_tensor(f"{name} A {updates[name].scale!r}", a) + describe_tensor("B", b))
    return AdapterWeights(state.hexdigest()[:32], updates)


def place_adapter(weights: AdapterWeights, model: LoadedModel) -> Adapter:
    """Return an adapter of this rank, whose weights are rounded to the model's dtype."""
    targets = _targets(check_adaptable(model), model)
    table = np.zeros(model.num_layers * len(LINEARS), UPDATE)
    held: list[Any] = [table]
    for name, (a, b, scale) in weights.updates.items():
        _, own_outputs, places = targets[name]
        packed_a, packed_b = pack_a(a.to(model.dtype)), pack_b(b[own_outputs].to(model.dtype))
        held += [packed_a, packed_b]
        for place in places:
            units = packed_b[place.first_unit : place.first_unit + place.num_units]
            table[place.update] = packed_a.data_ptr(), units.data_ptr(), *packed_a.shape, scale
    return Adapter(weights.digest, table.ctypes.data, int(table["rank"].max()), held)


def _targets(recipe: StepRecipe, model: LoadedModel) -> dict[str, _Target]:
    """Return the linear layers that can have an adapter, by name."""
    by_linear: dict[PackedLinear, list[_Place]] = defaultdict(list)
    for number, (attention, mlp) in enumerate(zip(recipe.attentions, recipe.mlps, strict=True)):
        first = len(LINEARS) * number
        for offset, linear in enumerate((*attention.projections, attention.output)):
            index = LINEARS.index("output") if linear is attention.output else offset
            by_linear[linear].append(_Place(first + index, 0, linear.packed.num_units))
        num_units = -(-mlp.size // UNIT)
        by_linear[mlp.gate].append(_Place(first + LINEARS.index("gate"), 0, num_units))
        if mlp.up is not None:
            first_unit = mlp.first_up_column // UNIT
            by_linear[mlp.up].append(_Place(first + LINEARS.index("up"), first_unit, num_units))
        by_linear[mlp.down].append(_Place(first + LINEARS.index("down"), 0, mlp.down.packed.num_units))
    return {
        name: _target(name, module, by_linear[module], model)
        for name, module in model.module.named_modules()
        if isinstance(module, PackedLinear) and module in by_linear
    }


def _target(name: str, linear: PackedLinear, places: list[_Place], model: LoadedModel) -> _Target:
    divided, collectives = model.divided.get(name), model.collectives
    if divided is None or collectives is None:
        return _Target((linear.out_features, linear.in_features), slice(None), places)
    if divided.division is Division.ROW:
        return _Target((linear.out_features, divided.size), slice(None), places)
    own = divided.own(collectives.rank, collectives.num_ranks)
    return _Target((divided.size, linear.in_features), own, places)


def _check_config(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedAdapterError(f"peft_type is {config.get('peft_type')!r}, and only LORA is supported")
    for field in _UNSUPPORTED:
        if config.get(field):
            raise UnsupportedAdapterError(f"{field} is not supported")
    if config.get("bias", "none") != "none":
        raise UnsupportedAdapterError(f"bias {config['bias']!r} is not supported")
    if (initial := config.get("init_lora_weights")) not in _INITIAL:
        raise UnsupportedAdapterError(
            f"init_lora_weights {initial!r} is not supported: it changes the model's own weights"
        )


def _pairs(path: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return A and B by the name of their linear layer."""
    found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for key, tensor in load_file(path).items():
        match = _TENSOR.fullmatch(key)
        if match is None:
            raise UnsupportedAdapterError(f"the tensor {key} is not supported")
        found[match[1]][match[2]] = tensor
    if not found:
        raise damaged(path, "has no tensors")
    if missing := [name for name, both in found.items() if both.keys() != {"A", "B"}]:
        raise damaged(path, f"has only one of lora_A and lora_B for {missing[0]}")
    return {name: (both["A"], both["B"]) for name, both in found.items()}


def _check_shapes(name: str, a: torch.Tensor, b: torch.Tensor, shape: tuple[int, int]) -> None:
    rank = len(a)
    expected = (rank, shape[1]), (shape[0], rank)
    if (tuple(a.shape), tuple(b.shape)) != expected:
        raise UnsupportedAdapterError(
            f"{name} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}; this model needs "
            f"{expected[0]} and {expected[1]}"
        )
    if not 0 < rank <= MAX_RANK:
        raise UnsupportedAdapterError(f"{name} has rank {rank}; it must be from 1 to {MAX_RANK}")


def _check_gathered(name: str, in_features: int, collectives: Collectives | None) -> None:
    """Raise UnsupportedAdapterError if the ranks' memory has no room for all inputs of a linear layer."""
    if collectives is not None and in_features > collectives.memory.sizes.gathered_width:
        raise UnsupportedAdapterError(
            f"{name} has {in_features} inputs, and {collectives.num_ranks} ranks gather at most "
            f"{collectives.memory.sizes.gathered_width}: choose a larger --tensor-parallel-size, or 1"
        )


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    """Return the factor of an update, by PEFT's rules."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    own = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    alpha = next(own, config.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise UnsupportedAdapterError(f"lora_alpha is {alpha!r}, which is no number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
