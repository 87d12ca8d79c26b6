"""Fills in the records of a model's layers, which ``kernels.cpu.step.records`` describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.engine.model.check import KvHeads
from quire.engine.model.layers.latent_attention import HeadLinear
from quire.engine.model.layers.packed_linear import PackedLinear
from quire.engine.model.layers.parallel_layers import DividedHead, RowLinear
from quire.engine.model.layers.row_layers import RowNorm
from quire.engine.model.program.recipe import AttentionRecipe, LatentRecipe, LayerRecipe, MlpRecipe
from quire.engine.model.program.state_recipe import StateRecipe
from quire.kernels.cpu.products.packed_weight import UNIT
from quire.kernels.cpu.products.unit_product import unit_kernel


def columns(layer: AttentionRecipe, num_heads: int, heads: KvHeads) -> tuple[int, int, int]:
    """Return the first column of keys and of values behind the queries, and the number of columns."""
    ends = np.cumsum([each.packed.num_units * UNIT for each in layer.projections]).tolist()
    if layer.latents is not None:
        return ends[0], ends[0] + layer.latents.latent_dim, ends[-1]
    if len(ends) == 3:
        return ends[0], ends[1], ends[2]
    key_column = num_heads * heads.head_dim
    return key_column, key_column + heads.num_kv_heads * heads.head_dim, ends[0]


def fill_layers(rows: Any, layers: Sequence[LayerRecipe]) -> None:
    """Fill in all that does not depend on the memory, nor on modules."""
    for row, layer in zip(rows, layers, strict=True):
        _fill_layer(row, layer)
    added = (row[name] for row in rows for name in ("output", "down"))
    for number, each in enumerate(each for each in added if each["borders"]):
        each["number"] = number


def _fill_layer(row: Any, layer: LayerRecipe) -> None:
    for name in ("attention_norm", "after_attention_norm", "mlp_norm", "after_mlp_norm"):
        row[name] = norm_record(getattr(layer, name))
    row["attention_scale"], row["mlp_scale"] = layer.attention_scale, layer.mlp_scale
    if layer.residual_scales is not None:
        row["attention_norm"]["residual_scale"], row["mlp_norm"]["residual_scale"] = layer.residual_scales
    if isinstance(attention := layer.attention, AttentionRecipe):
        row["query_norm"], row["key_norm"] = (
            norm_record(attention.query_norm),
            norm_record(attention.key_norm),
        )
        for name, projection in zip(("query", "key", "value"), attention.projections, strict=False):
            row[name] = linear_record(projection)
        row["query_scale"] = attention.query_scale
        row["output"] = linear_record(attention.output)
        if attention.latents is not None:
            _fill_latents(row, attention.latents)
    elif isinstance(attention, StateRecipe):
        row["output"] = linear_record(attention.output)
    row["has_experts"] = not isinstance(layer.mlp, MlpRecipe)
    if (mlp := layer.mlp if isinstance(layer.mlp, MlpRecipe) else layer.shared) is not None:
        _fill_mlp(row, mlp)


def _fill_latents(row: Any, latents: LatentRecipe) -> None:
    row["latent_dim"], row["is_interleaved"] = latents.latent_dim, latents.is_interleaved
    if latents.query_up is not None:
        row["query_up"] = linear_record(latents.query_up)
    row["key_heads"] = _head_record(latents.key_heads)
    row["value_heads"] = _head_record(latents.value_heads)


def _head_record(heads: HeadLinear) -> tuple[int, ...]:
    weight = heads.packed
    address = unit_kernel(weight.stored).address
    return address, weight.panels.data_ptr(), 0, weight.in_features, 1, weight.num_units, 0, 0, 0


def _fill_mlp(row: Any, mlp: MlpRecipe) -> None:
    row["down"] = linear_record(mlp.down)
    row["activation"] = mlp.activation.kind
    num_units = -(-mlp.size // UNIT)
    row["gate"] = linear_record(mlp.gate)
    row["gate"]["num_units"] = num_units
    if mlp.up is not None:
        row["up"] = linear_record(mlp.up)
        up = row["up"]
        up["weight"] += mlp.first_up_column // UNIT * mlp.up.packed.unit_bytes
        up["bias"] += 4 * mlp.first_up_column if up["bias"] else 0
        up["num_units"] = num_units


def linear_record(layer: PackedLinear) -> tuple[int, ...]:
    """Return the values of a linear layer's record."""
    bias = 0 if layer.bias is None else layer.bias.data_ptr()
    weight = layer.packed
    address, num_units = weight.panels.data_ptr(), weight.num_units
    if isinstance(layer, DividedHead):
        address, num_units = address + layer.first_unit * weight.unit_bytes, layer.num_units
        bias += 4 * layer.first_unit * UNIT if bias else 0
    borders = layer.borders.ctypes.data if isinstance(layer, RowLinear) else 0
    sizes = layer.in_features, layer.num_segments, num_units
    return unit_kernel(weight.stored).address, address, bias, *sizes, 0, borders, 0


def first_column(head: PackedLinear) -> int:
    """Return the index of the logit that the head's first output computes."""
    return head.first_column if isinstance(head, DividedHead) else 0


def norm_record(norm: RowNorm | None) -> tuple[int, int, int, float, float]:
    """Return the values of a norm's record; zeros if there is no norm."""
    if norm is None:
        return 0, 0, 0, 0.0, 0.0
    bias = 0 if norm.bias32 is None else norm.bias32.data_ptr()
    return norm.weight32.data_ptr(), bias, int(norm.kind), norm.epsilon, 0.0
