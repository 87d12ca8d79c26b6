"""How the layers of a compiled step call attention: over which blocks, and for which tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.engine.kv_cache.memory import KvMemory
from quire.engine.model.check import KvHeads
from quire.engine.model.program.layer_records import columns
from quire.engine.model.program.recipe import AttentionRecipe, StepRecipe
from quire.engine.model.step_tensors import StepTensors
from quire.kernels.cpu.attention import kernel_for, latent_group
from quire.kernels.cpu.attention_program import ARGUMENTS, Array
from quire.kernels.cpu.attention_tiles import (
    AttentionShape,
    DecodeTiles,
    make_parts,
    make_tiles,
    one_part_each,
    part_tokens,
)
from quire.kernels.cpu.intrinsics import STORAGE
from quire.kernels.cpu.step.records import ATTENTION_COUNTER, COUNTERS_PER_LAYER
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.quantization import KV_FORMATS

_KV_FORMATS = {torch.int8: 1, torch.float8_e4m3fn: 2}


class AttentionCalls:
    """Records of the calls, one for each layer.

    Args:
        recipe: description of the model's computation.
        heads: how it calls attention.
        memory: its KV blocks.
        layers: the records of the layers, in which the calls are filled in.
        counters: the address of the layers' counters.

    Attributes:
        num_heads: number of query heads that the program computes.
    """

    def __init__(
        self, recipe: StepRecipe, heads: KvHeads, memory: KvMemory, layers: Array, counters: int
    ) -> None:
        self._recipe, self._heads, self._memory, self._layers = recipe, heads, memory, layers
        self._calls = np.zeros(len(layers), ARGUMENTS)
        self._calls["next_program"] = counters + 8 * (
            COUNTERS_PER_LAYER * np.arange(len(layers)) + ATTENTION_COUNTER
        )
        self.num_heads, self._shape = _heads(recipe, heads, memory.shape.block_size)
        self._decode_tiles = DecodeTiles(self._shape)
        self._part_tokens = part_tokens(
            self._shape.group, heads.head_dim + (heads.latent_dim or heads.head_dim)
        )
        self._frames = np.zeros(len(layers), np.int64)
        # Records contain only addresses, so these references keep the memory alive.
        self._held: list[torch.Tensor] = []
        self._parts: list[Array] = []
        for index, layer in enumerate(recipe.layers):
            if isinstance(layer.attention, AttentionRecipe):
                self._fill(index, layer.attention)

    def step_values(self) -> dict[str, Any]:
        """Return the fields of a step's record that describe heads and blocks."""
        heads, memory, recipe = self._heads, self._memory, self._recipe
        first, shape = memory.layers[0], memory.shape
        values: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": heads.num_kv_heads,
            "head_dim": heads.head_dim,
            "block_size": shape.block_size,
            **dict(zip(("block_stride", "value_offset", "head_stride"), first.stride(), strict=False)),
            "kv_format": _KV_FORMATS.get(first.dtype, 0),
        }
        if memory.scales[0] is not None:
            values["scale_block_stride"], values["scale_value_offset"] = memory.scales[0].stride()[:2]
            values["scale_per_magnitude"] = KV_FORMATS[first.dtype].scale_per_magnitude
        if recipe.attentions:
            latent_dim, storage = heads.latent_dim or None, STORAGE[first.dtype]
            sizes = (heads.head_dim, shape.block_size, self._shape.group)
            values["attend"] = kernel_for(*sizes, storage, latent_dim, heads.arithmetic).address
            own_columns = columns(recipe.attentions[0], self.num_heads, heads)
            values |= zip(("key_column", "value_column", "qkv_stride"), own_columns, strict=True)
        if recipe.latents:
            values["value_offset"] = heads.latent_dim
        return values

    def _fill(self, index: int, layer: AttentionRecipe) -> None:
        """Fill in how a layer calls attention."""
        heads, number = self._heads, layer.number
        call, kv_layer, scales = heads.calls[number], self._memory.layers[number], self._memory.scales[number]
        row, arguments = self._layers[index], self._calls[index]
        self._frames[index] = self._memory.frames[number]
        row["kv"] = kv_layer.data_ptr()
        row["kv_scales"] = 0 if scales is None else scales.data_ptr()
        row["query_stride"] = heads.head_dim * (2 if layer.is_gated else 1)
        row["attention"] = self._calls.ctypes.data + index * ARGUMENTS.itemsize
        arguments["kv"], arguments["kv_scales"] = row["kv"], row["kv_scales"]
        arguments["block_stride"], arguments["value_offset"], arguments["head_stride"] = kv_layer.stride()[:3]
        if layer.latents is not None:
            arguments["value_offset"] = arguments["head_stride"] = 0
        if scales is not None:
            arguments["scale_block_stride"], arguments["scale_value_offset"] = scales.stride()[:2]
        slopes = torch.zeros(self.num_heads)
        sinks = slopes - torch.inf if call.sinks is None else call.sinks.float().clone()
        self._held += [sinks, slopes]
        arguments["sinks"], arguments["slopes"] = sinks.data_ptr(), slopes.data_ptr()
        arguments["num_kv_heads"], arguments["num_heads"] = self._shape.num_kv_heads, self.num_heads
        arguments["window"], arguments["is_chunked"] = call.window or 0, call.is_chunked
        arguments["scale"], arguments["softcap"] = call.scale, call.softcap or 0.0

    def place_rows(self, queries: int, outputs: int) -> None:
        """Tell the calls the addresses of their queries and outputs."""
        self._calls["query"], self._calls["output"] = queries, outputs

    def place(self, tensors: StepTensors, keeps_all_rows: bool) -> None:
        """Tell the calls which sequences there are; the last layer's may be only for the kept rows."""
        metadata, calls = tensors.metadata, self._calls
        self._layers["slots"] = _entry_addresses(metadata.slot_mapping, 1, self._frames)
        calls["block_tables"] = _entry_addresses(metadata.block_tables, 2, self._frames)
        calls["table_width"] = metadata.block_tables.shape[-1]
        calls["query_starts"] = metadata.query_starts.data_ptr()
        calls["seq_lens"] = metadata.seq_lens.data_ptr()
        parts, tiles = last_parts, last_tiles = self._tiles(metadata)
        if not keeps_all_rows and len(tensors.logit_rows) == len(metadata.query_starts) - 1:
            last_parts = _one_row_each(tensors.logit_rows, metadata.query_starts)
            last_tiles = one_part_each(len(tensors.logit_rows))
        self._parts = [parts, tiles, last_parts, last_tiles]
        calls["parts"][:-1], calls["parts"][-1] = parts.ctypes.data, last_parts.ctypes.data
        calls["tiles"][:-1], calls["tiles"][-1] = tiles.ctypes.data, last_tiles.ctypes.data
        calls["num_programs"][:-1] = len(tiles) * self._shape.num_kv_heads
        calls["num_programs"][-1] = len(last_tiles) * self._shape.num_kv_heads

    def _tiles(self, metadata: AttentionMetadata) -> tuple[Array, Array]:
        """Return the parts and tiles of a step."""
        starts = metadata.query_starts.numpy()
        # Sequences that share a block share all its frames, so the first frame is enough.
        sequences = (metadata.of_frame(0).block_tables.numpy(), starts, metadata.seq_lens.numpy())
        num_threads = torch.get_num_threads()
        if metadata.slot_mapping.shape[-1] == len(starts) - 1:
            return self._decode_tiles.of(*sequences, num_threads)
        parts = make_parts(starts, np.diff(starts), self._part_tokens)
        return make_tiles(parts, *sequences, self._shape, num_threads)


def _heads(recipe: StepRecipe, heads: KvHeads, block_size: int) -> tuple[int, AttentionShape]:
    """Return the number of query heads that the program computes, and what its tiles depend on."""
    if recipe.latents:
        num_heads = recipe.latents[0].key_heads.num_heads
        return num_heads, AttentionShape(block_size, num_heads, num_heads // latent_group(num_heads))
    num_heads = max((each.output.in_features for each in recipe.attentions), default=0) // heads.head_dim
    return num_heads, AttentionShape(block_size, max(num_heads, heads.num_kv_heads), heads.num_kv_heads)


def _entry_addresses(tensor: torch.Tensor, num_dims: int, frames: Array) -> Array | int:
    """Return the address of the entry of each layer's frame; of the whole tensor if blocks are one frame."""
    if tensor.dim() == num_dims:
        assert not frames.any(), "the tables are those of blocks of one frame"
        return tensor.data_ptr()
    return tensor.data_ptr() + frames * (tensor.stride(0) * tensor.element_size())


def _one_row_each(rows: torch.Tensor, starts: torch.Tensor) -> Array:
    """Return parts of attention with one token each; see ``make_parts``."""
    sequences = torch.searchsorted(starts.long(), rows, right=True) - 1
    return torch.stack((sequences, rows, rows + 1), dim=1).numpy()
